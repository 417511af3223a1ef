// Which gradients lie in which bucket, and in which order.
//
// Example: a Llama with 2 layers in fp32 gradients, 25,077,760 bytes in all; caps 1 MiB and 25 MiB.
// Backward makes the head's gradient first, 2,048,000 bytes. That is above 1 MiB, so the first
// bucket is the head alone. The other 23,029,760 bytes stay below 25 MiB and are the second bucket.
// In the first pass, whose order is not known yet, one bucket has everything.
//
// Small first buckets let the first all-reduce begin early. O(parameters of ops), and a sort where
// the model's order counts.

#include "schedule/lower/ddp_buckets.h"

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

// The parameter, or the one that it is tied to.
ParamId StorageOfParam(const Model& model, ParamId p) {
  const ParamId tied = model.params[p.value].tied_to;
  return tied.valid() ? tied : p;
}

// By storage: where in the buffer of its op's gradients a parameter's begins. Behind those of the
// op that runs backward first lies what the others have beside what they share.
std::vector<std::int64_t> GradientOffsets(const Model& model, const ModelAnalysis& a) {
  std::vector<std::int64_t> offsets(model.params.size(), 0), ends(model.params.size(), 0);
  std::vector<bool> seen(model.params.size(), false);
  for (std::size_t i = model.ops.size(); i-- > 0;) {
    if (!a.ops[i].weight_grad) {
      continue;
    }
    std::int64_t& end = ends[a.grad_group[i].value];
    for (const ParamId p : model.ops[i].params) {
      const std::size_t storage = StorageOfParam(model, p).value;
      if (a.param_grad[p.value] && !seen[storage]) {
        seen[storage] = true;
        offsets[storage] = end;
        end += model.params[p.value].Elements();
      }
    }
  }
  return offsets;
}

// A parameter's place in a bucket: its range of the gradient buffer, and whether it has a gradient.
struct BucketTensor {
  BucketPart part;
  ParamId storage;
  bool has_gradient = true;
};

// Those with a gradient, in the order in which backward makes it.
std::vector<BucketTensor> ReadyTensors(const Model& model, const ModelAnalysis& a, DType param) {
  const std::vector<std::int64_t> offsets = GradientOffsets(model, a);
  std::vector<BucketTensor> order;
  std::vector<bool> seen(model.params.size(), false);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {  // the first op is the last in backward
    if (!a.ops[i].weight_grad) {
      continue;
    }
    const bool casts =
        AnyOf(model.ops[i].params, [&](ParamId p) { return param != a.masters[p.value]; });
    const std::vector<ParamId> params = AsReady(model, model.ops[i], casts);
    for (auto p = params.rbegin(); p != params.rend(); ++p) {
      const std::size_t storage = StorageOfParam(model, *p).value;
      if (a.param_grad[p->value] && !seen[storage]) {
        seen[storage] = true;
        const std::int64_t begin = offsets[storage];
        const std::int64_t end = begin + model.params[p->value].Elements();
        const std::int64_t width = SizeOf(a.masters[storage]);
        order.push_back(
            {{a.grad_group[i], Bytes(begin * width), Bytes(end * width)}, ParamId(storage)});
      }
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

// By storage: its first place in the order in which parameters are registered.
std::vector<std::size_t> PlacesOf(const Model& model) {
  std::vector<std::size_t> place(model.params.size(), model.params.size());
  for (std::size_t p = model.params.size(); p-- > 0;) {
    place[StorageOfParam(model, ParamId(p)).value] = p;
  }
  return place;
}

// torch lists `parameters()`, each once; those without a gradient that are frozen are not there.
std::vector<BucketTensor> TensorsInOrder(const LowerInput& in, const ModelAnalysis& a,
                                         BucketOrder order) {
  const Model& model = in.model;
  std::vector<BucketTensor> tensors = ReadyTensors(model, a, in.job.precision.param);
  std::vector<bool> seen(model.params.size(), false);
  const auto add_unused = [&](std::size_t p) {
    const std::size_t storage = StorageOfParam(model, ParamId(p)).value;
    if (!in.without_gradient.empty() && in.without_gradient[p] && !seen[storage]) {
      seen[storage] = true;
      const Bytes size(model.params[p].Elements() * SizeOf(a.masters[p]));
      tensors.push_back({{ParamId(storage), Bytes(0), size}, ParamId(storage), false});
    }
  };
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    add_unused(p);
  }
  if (order == BucketOrder::kRegistered) {
    const std::vector<std::size_t> place = PlacesOf(model);
    SortAll(tensors, [&](const BucketTensor& x, const BucketTensor& y) {
      return place[x.storage.value] < place[y.storage.value];
    });
  }
  return tensors;
}

// Neighbours are one part.
void AddPart(const BucketPart& part, std::vector<BucketPart>& parts) {
  if (!parts.empty() && parts.back().storage == part.storage) {
    BucketPart& last = parts.back();
    if (last.begin == part.end || last.end == part.begin) {
      last.begin = std::min(last.begin, part.begin);
      last.end = std::max(last.end, part.end);
      return;
    }
  }
  parts.push_back(part);
}

}  // namespace

// A linear layer is addmm(bias, input, weight.t()): the bias has no node between. Under autocast
// both have one, the casts. The weight's cast is made later and goes first: g++, with which torch's
// wheels are made, evaluates the arguments of a call (autocast_mode.h) from the last on. Experts
// end with `down`.
std::vector<ParamId> AsReady(const Model& model, const ModelOp& op, bool casts) {
  std::vector<ParamId> params = op.params;
  const OpKind kind = model.SpecOf(op).kind;
  if ((kind == OpKind::kLinear && !casts) || kind == OpKind::kExperts) {
    std::reverse(params.begin(), params.end());
  }
  return params;
}

// Tensors of one dtype share a bucket. Buckets come as they are closed, and of those left open at
// the end the dtype that came last goes first (reducer.cpp, compute_bucket_assignment_by_size). As
// long as torch has not seen in which order gradients come, it sorts buckets by the parameter that
// is registered first, and takes the last one first.
std::vector<BucketPlan> PlanBuckets(const LowerInput& in, const ModelAnalysis& a, BucketOrder order,
                                    Bytes first, Bytes rest) {
  struct Open {
    BucketPlan plan;
    Bytes cap;
    std::size_t begin = 0;  // the parameter of it that is registered first
  };
  const std::vector<std::size_t> places = PlacesOf(in.model);
  std::vector<Open> open, closed;
  for (const BucketTensor& tensor : TensorsInOrder(in, a, order)) {
    const std::size_t storage = tensor.storage.value;
    const DType dtype = a.masters[storage];
    auto at = FindIf(open, [&](const Open& o) { return o.plan.dtype == dtype; });
    if (at == open.end()) {
      at = open.insert(at, {{{}, Bytes(0), dtype}, first, places[storage]});
    }
    BucketPlan& b = at->plan;
    at->begin = b.size == Bytes(0) ? places[storage] : std::min(at->begin, places[storage]);
    if (tensor.has_gradient) {
      AddPart(tensor.part, b.parts);
    }
    b.size += tensor.part.end - tensor.part.begin;
    if (b.size >= at->cap) {
      closed.push_back(*at);
      at->plan = {{}, Bytes(0), dtype};
      at->cap = rest;
    }
  }
  for (auto o = open.rbegin(); o != open.rend(); ++o) {
    if (o->plan.size > Bytes(0)) {
      closed.push_back(std::move(*o));
    }
  }
  if (order == BucketOrder::kRegistered || first == kNoCap) {
    SortAll(closed, [](const Open& x, const Open& y) { return x.begin > y.begin; });
  }
  return Mapped<BucketPlan>(closed, [](const Open& o) { return o.plan; });
}

void CheckAllReachTheLoss(const Model& model, const ModelAnalysis& a) {
  std::vector<bool> reaches(model.params.size(), false);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const ParamId p : model.ops[i].params) {
      if (a.ops[i].weight_grad) {
        reaches[StorageOfParam(model, p).value] = true;
      }
    }
  }
  for (std::uint32_t p = 0; p < model.params.size(); ++p) {
    if (a.param_grad[p] && !reaches[StorageOfParam(model, ParamId(p)).value]) {
      throw InputError(
          "plan: dialect",
          "ddp with trainable parameter \"" + model.params[p].fqn + "\", which reaches no loss",
          "one that gets a gradient, or is frozen",
          "torch waits for it and stops in the second step: Expected to have finished reduction in "
          "the prior iteration; find_unused_parameters or static_graph reduces zeros for it");
    }
  }
}

}  // namespace shardwright
