// Which activations travel to the host, when they leave, and when they come back.
//
// Example: layers 1, 2, 3, 4 run forward, each keeping 1 MiB. Layers of backward are counted from
// the model's end: layer 4 is 0, layer 3 is 1, and so on.
//
//   forward   after a tensor's last read, its copy to the host is queued on d2h. When layer 3
//             begins, the 1 MiB of layer 1 is freed: compute waits for that layer's last copy.
//   stay      the tensors that backward reads first (layer 4's). They would come back at once.
//   backward  when backward enters layer 4, the tensors of layer 3 are fetched on h2d. As it enters
//             layer 3, compute waits for them, and those of layer 2 are fetched.
//
// So the device holds about two layers of kept activations instead of four. A tensor also stays if
// it is an index, if it has less than 1 KiB, or if backward uses only its recomputed copy.

#include "schedule/lower/activation_offload.h"

#include <algorithm>
#include <array>

namespace shardwright {
namespace {

// Smaller tensors stay: a copy of them costs more than it frees.
constexpr Bytes kSmallestOffload{1024};

}  // namespace

// Three passes, O(ops + kept tensors): number the layers of backward, find the first backward op
// that reads each storage, and choose the storages that travel. A recomputed op reads its inputs
// when its region begins to run again, which is earlier than its own backward; `region_begins` says
// when.
ActivationOffload::ActivationOffload(Emitter& emitter, const std::vector<bool>& backward_mark,
                                     const std::vector<std::uint32_t>& region_begins,
                                     const std::vector<bool>& products)
    : e_(emitter) {
  const Model& model = e_.in.model;
  const auto n = static_cast<std::uint32_t>(model.ops.size());
  layer_of_op_.assign(n, 0);
  std::uint32_t layer = 0;
  bool any = false;
  for (std::uint32_t i = n; i-- > 0;) {
    if (backward_mark[i] && e_.a.ops[i].has_backward) {
      layer += any ? 1 : 0;
      any = true;
    }
    layer_of_op_[i] = layer;
  }
  products_of_.assign(layer + 1, 0);
  for (std::uint32_t i = 0; i < n; ++i) {
    if (!products.empty() && products[i] && e_.a.ops[i].has_backward) {
      products_of_[layer_of_op_[i]] += e_.a.ops[i].reruns ? 2 : 1;
    }
  }
  // The first op in backward order that reads the forward instance of each storage.
  std::vector<std::uint32_t> first_read(e_.a.storages.size(), kNoRegion);
  const auto read = [&](std::uint32_t s, std::uint32_t reader, std::uint32_t at) {
    const std::uint32_t p = e_.a.storages[s].producer;
    const bool rerun = e_.a.storages[s].recomputed && p != kNoRegion &&
                       e_.a.ops[p].region == e_.a.ops[reader].region;
    if (!rerun && (first_read[s] == kNoRegion || at > first_read[s])) {
      first_read[s] = at;
    }
  };
  for (std::uint32_t i = 0; i < n; ++i) {
    if (e_.a.ops[i].has_backward) {
      ForEachSaved(e_.a, model, i, [&](std::uint32_t s, Role, std::uint16_t) { read(s, i, i); });
    }
    if (e_.a.ops[i].reruns) {
      for (const TensorId t : model.ops[i].inputs) {
        read(e_.a.storage_of[t.value], i, region_begins[e_.a.ops[i].region]);
      }
    }
  }
  travels_.assign(e_.a.storages.size(), false);
  fetched_for_.resize(layer + 1);
  for (std::uint32_t s = 0; s < e_.a.storages.size(); ++s) {
    const StorageFacts& f = e_.a.storages[s];
    const bool kept = f.backward_uses > 0 && f.forward_uses > 0 && f.producer != kNoRegion;
    // A tensor that the first layer of backward reads would come back as soon as it has left.
    if (kept && !f.is_index && f.bytes >= kSmallestOffload && first_read[s] != kNoRegion &&
        layer_of_op_[first_read[s]] > 0) {
      travels_[s] = true;
      fetched_for_[layer_of_op_[first_read[s]]].push_back(s);
    }
  }
}

void ActivationOffload::BeginForward() {
  reads_left_.clear();
  for (const StorageFacts& f : e_.a.storages) {
    reads_left_.push_back(f.forward_uses);
  }
  host_.assign(e_.a.storages.size(), HostCopy{});
  arrived_.assign(fetched_for_.size(), OpId());
}

// Counts the reads of a storage down. A storage with three readers is copied after the third, since
// a copy earlier would let nothing go.
void ActivationOffload::AfterForwardRead(std::uint32_t storage, BufferId buffer) {
  if (!travels_[storage] || --reads_left_[storage] > 0) {
    return;
  }
  const Bytes bytes = e_.a.storages[storage].bytes;
  HostCopy& copy = host_[storage];
  copy.host = e_.AllocOnHost(bytes, Category::kActivation, std::array{e_.Pinned(bytes)});
  const OpId read = e_.LastCompute();
  copy.copied = e_.AddTransfer(OpCode::kCopyD2h, Stream::kD2h, {Phase::kForward, kNoSubject}, bytes,
                               buffer, copy.host);
  e_.After(read);
  current_.buffers.push_back(buffer);
  current_.last_copy = copy.copied;
}

void ActivationOffload::FreeBatch(Batch& batch) {
  if (!batch.buffers.empty()) {
    // The next use of these bytes, on compute, must not overtake the copies.
    e_.AddWait(Stream::kCompute, {batch.last_copy}, Phase::kForward, kNoSubject);
    for (const BufferId b : batch.buffers) {
      e_.body->Free(b);
    }
  }
  batch = Batch{};
}

void ActivationOffload::NextForwardLayer() {
  FreeBatch(previous_);
  std::swap(previous_, current_);
}

void ActivationOffload::EndForward() {
  FreeBatch(previous_);
  FreeBatch(current_);
}

// Example with `products` = 3 and 3 tensors of 1 MiB left: one third of 3 MiB is due, so one tensor
// is fetched. The next call comes with 2 products and 2 MiB left, and fetches the next one. With 1
// product all that is left is fetched.
void ActivationOffload::Fetch(std::uint32_t products, Fetched& fetched) {
  const std::uint32_t layer = layer_ + 1;
  if (layer >= fetched_for_.size() || next_ == fetched_for_[layer].size()) {
    return;
  }
  // One layer ahead of compute, no further.
  e_.AddWait(Stream::kH2d, {e_.LastCompute()}, Phase::kBackward, kNoSubject);
  const auto bytes_of = [&](std::uint32_t s) { return e_.a.storages[s].bytes; };
  Bytes left;
  for (std::size_t i = next_; i < fetched_for_[layer].size(); ++i) {
    left += bytes_of(fetched_for_[layer][i]);
  }
  const Bytes stays = left - left / std::max<std::int64_t>(products, 1);
  for (; left > stays; ++next_) {
    const std::uint32_t s = fetched_for_[layer][next_];
    left -= bytes_of(s);
    const BufferId device = e_.Alloc(bytes_of(s), Category::kActivation, Stream::kH2d);
    arrived_[layer] = e_.AddTransfer(OpCode::kCopyH2d, Stream::kH2d, {Phase::kBackward, kNoSubject},
                                     bytes_of(s), host_[s].host, device);
    e_.After(host_[s].copied);
    e_.body->Free(host_[s].host, StreamBit(Stream::kH2d) | StreamBit(Stream::kD2h));
    fetched.emplace_back(s, device);
  }
}

ActivationOffload::Fetched ActivationOffload::NextBackwardLayer(std::uint32_t model_op) {
  Fetched fetched;
  const std::uint32_t layer = layer_of_op_[model_op];
  if (layer > layer_) {
    Fetch(1, fetched);  // what no product came for
  }
  layer_ = layer;
  next_ = 0;
  products_left_ = products_of_[layer];
  e_.AddWait(Stream::kCompute, {arrived_[layer]}, Phase::kBackward, kNoSubject);
  if (products_left_ == 0) {
    Fetch(1, fetched);
  }
  return fetched;
}

ActivationOffload::Fetched ActivationOffload::NextProduct() {
  Fetched fetched;
  if (products_left_ > 0) {
    Fetch(products_left_--, fetched);
  }
  return fetched;
}

}  // namespace shardwright
