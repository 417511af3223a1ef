// Experts that ranks share out: rows and their numbers on the way to other ranks.

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "executor/internal/binder.h"
#include "models/cut_experts.h"

namespace shardwright {

void Binder::FindExperts(std::deque<std::vector<std::int64_t>>& row_counts) {
  std::vector<UnitId> unit_of(in_.model.params.size());
  for (std::size_t u = 0; u < program_.units.size(); ++u) {
    for (const ParamSlot& slot : program_.units[u].params) {
      unit_of[slot.param.value] = UnitId(u);
    }
  }
  experts_.resize(program_.units.size());
  for (const ModelOp& op : in_.model.ops) {
    const OpSpec& spec = in_.model.SpecOf(op);
    if (spec.kind != OpKind::kExperts || !spec.routed) {
      continue;
    }
    const UnitId unit = unit_of[op.params.front().value];
    if (experts_[unit.value].op != nullptr) {
      throw InputError("plan: units: " + program_.units[unit.value].name, "experts of two layers",
                       "a unit for those of each layer, where ranks share them out");
    }
    const std::int64_t all = spec.experts * program_.expert_size;
    experts_[unit.value] = {&op, &row_counts.emplace_back(2 * all * program_.micro_batch_count)};
  }
}

// Of a micro-batch.
std::span<std::int64_t> Binder::CountsOf(const SharedExperts& experts,
                                         std::int64_t micro_batch) const {
  const auto size = experts.counts->size() / static_cast<std::size_t>(program_.micro_batch_count);
  return std::span(*experts.counts).subspan(static_cast<std::size_t>(micro_batch) * size, size);
}

std::span<std::byte> Binder::CameFor(const ModelOp& op, std::int64_t micro_batch) const {
  const auto found = std::find_if(experts_.begin(), experts_.end(),
                                  [&](const SharedExperts& experts) { return experts.op == &op; });
  SW_CHECK(found != experts_.end(), "experts of rows that came are in a unit");
  const std::span<std::int64_t> counts = CountsOf(*found, micro_batch);
  return std::as_writable_bytes(counts.subspan(counts.size() / 2));
}

// The numbers leave the device: those of the rows that this rank sends, then of those that come.
Call Binder::BindCounts(const OpView& v) {
  SW_CHECK(v.inputs.size() == 2 && v.outputs.empty() &&
               v.inputs[0].bytes + v.inputs[1].bytes == v.shape->bytes,
           "copies of two buffers to the host are of row counts");
  const std::span<std::int64_t> counts = CountsOf(experts_[v.unit().value], v.op->micro_batch);
  SW_CHECK(std::ssize(counts) * SizeOf(DType::kInt64) == v.shape->bytes.value, "row counts");
  CopyCall copy;
  auto* to = reinterpret_cast<std::byte*>(counts.data());
  for (const Access& access : v.inputs) {
    copy.runs.push_back(RawRun(At(access.buffer), to, access.bytes.value));
    to += access.bytes.value;
  }
  return copy;
}

Call Binder::BindAllToAll(const OpView& v) {
  const Access& from = v.inputs.front();
  const Access& to = v.outputs.front();
  CollectiveCall call = CollectiveOf(*v.shape);
  call.send = At(from.buffer);
  call.receive = At(to.buffer);
  if (call.dtype == DType::kInt64) {
    return call;  // the numbers themselves, as many for each rank
  }
  const SharedExperts& experts = experts_[v.unit().value];
  SW_CHECK(experts.op != nullptr, "rows are sent for a unit with experts");
  const OpSpec& spec = in_.model.SpecOf(*experts.op);
  const std::span<std::int64_t> counts = CountsOf(experts, v.op->micro_batch);
  const auto half = static_cast<std::ptrdiff_t>(counts.size()) / 2;
  RowParts rows;
  rows.sent = counts.data() + (from.index == kToExperts ? 0 : half);
  rows.came = counts.data() + (from.index == kToExperts ? half : 0);
  rows.experts = spec.experts;
  rows.row_bytes = spec.in * SizeOf(call.dtype);
  rows.send_room = BufferOf(from.buffer).size.value;
  rows.receive_room = BufferOf(to.buffer).size.value;
  call.rows = rows;
  return call;
}

}  // namespace shardwright
