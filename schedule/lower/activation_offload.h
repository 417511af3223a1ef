#pragma once

// Offload of activations: tensors kept for backward travel to host memory on the d2h stream while
// forward goes on, and come back on the h2d stream one layer before backward needs them.

#include <cstdint>
#include <utility>
#include <vector>

#include "schedule/lower/emitter.h"

namespace shardwright {

class ActivationOffload {
 public:
  // `backward_mark`: per model op, a layer begins there in backward order. `region_begins`: per
  // checkpointed region, the op before whose backward it runs again. `products`: ops
  // beside which copies back begin; empty: all.
  ActivationOffload(Emitter& emitter, const std::vector<bool>& backward_mark,
                    const std::vector<std::uint32_t>& region_begins,
                    const std::vector<bool>& products);

  void BeginForward();
  // A forward op has read `storage`, which lives in `buffer`. After its last read it is copied out.
  void AfterForwardRead(std::uint32_t storage, BufferId buffer);
  // A layer begins in forward: what the layer before the last one copied out is freed.
  void NextForwardLayer();
  void EndForward();
  // A layer begins in backward at `model_op`: its tensors are there, those of the next layer are on
  // their way. Returns the storages that now have a device buffer again.
  using Fetched = std::vector<std::pair<std::uint32_t, BufferId>>;
  [[nodiscard]] Fetched NextBackwardLayer(std::uint32_t model_op);
  // One of `products` follows in backward or recomputation. As above.
  [[nodiscard]] Fetched NextProduct();

 private:
  struct Batch {  // what one layer copied out
    std::vector<BufferId> buffers;
    OpId last_copy;
  };
  struct HostCopy {
    BufferId host;
    OpId copied;
  };
  void FreeBatch(Batch& batch);
  // The next tensors of the layer behind `layer_`, an equal share of their bytes for each of so
  // many products.
  void Fetch(std::uint32_t products, Fetched& fetched);

  Emitter& e_;
  std::vector<std::uint32_t> layer_of_op_;               // backward layers, 0 is the model's end
  std::vector<std::vector<std::uint32_t>> fetched_for_;  // per layer: storages first read there
  std::vector<bool> travels_;                            // per storage
  std::vector<std::uint32_t> reads_left_;                // per storage, in forward
  std::vector<HostCopy> host_;                           // per storage
  std::vector<OpId> arrived_;                            // per layer: its last copy back
  std::vector<std::uint32_t> products_of_;               // per layer, recomputed ones included
  // In backward: where it is, and of the next layer, what is not on its way yet.
  std::uint32_t layer_ = 0;
  std::uint32_t products_left_ = 0;  // of `layer_`
  std::size_t next_ = 0;             // into its fetched_for_
  Batch current_, previous_;
};

}  // namespace shardwright
