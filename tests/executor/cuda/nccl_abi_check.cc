// Compared at compile time where the header is installed: what executor/cuda/nccl.h says about NCCL
// without it.

#include <cstddef>

#include <nccl.h>

#include "executor/cuda/nccl.h"

namespace shardwright {

static_assert(NcclNumbers::kSuccess == ncclSuccess);
static_assert(NcclNumbers::kInProgress == ncclInProgress);
static_assert(NcclNumbers::kUint8 == ncclUint8);
static_assert(NcclNumbers::kInt64 == ncclInt64);
static_assert(NcclNumbers::kFp16 == ncclFloat16);
static_assert(NcclNumbers::kFp32 == ncclFloat32);
static_assert(NcclNumbers::kFp64 == ncclFloat64);
static_assert(NcclNumbers::kBf16 == ncclBfloat16);
static_assert(NcclNumbers::kSum == ncclSum);
static_assert(NcclNumbers::kAvg == ncclAvg);
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(NcclConfig, least_blocks) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(NcclConfig, most_blocks) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(NcclConfig, network) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(NcclConfig, shares_on_split) == offsetof(ncclConfig_t, splitShare));
#if NCCL_VERSION_CODE >= 22800
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(offsetof(NcclConfig, traffic_class) == offsetof(ncclConfig_t, trafficClass));
static_assert(offsetof(NcclConfig, name) == offsetof(ncclConfig_t, commName));
static_assert(offsetof(NcclConfig, collnet) == offsetof(ncclConfig_t, collnetEnable));
static_assert(offsetof(NcclConfig, block_policy) == offsetof(ncclConfig_t, CTAPolicy));
static_assert(offsetof(NcclConfig, shares_on_shrink) == offsetof(ncclConfig_t, shrinkShare));
static_assert(offsetof(NcclConfig, nvls_blocks) == offsetof(ncclConfig_t, nvlsCTAs));
static_assert(offsetof(NcclConfig, channels_per_peer) ==
              offsetof(ncclConfig_t, nChannelsPerNetPeer));
static_assert(offsetof(NcclConfig, nvlink_centric) == offsetof(ncclConfig_t, nvlinkCentricSched));
static_assert(NcclNumbers::kSymmetricWindow == NCCL_WIN_COLL_SYMMETRIC);
static_assert(NcclNumbers::kWindowAlignment == NCCL_WIN_REQUIRED_ALIGNMENT);
static_assert(NcclNumbers::kCopyEngines == NCCL_CTA_POLICY_ZERO);
#endif
constexpr ncclConfig_t kInitial = NCCL_CONFIG_INITIALIZER;
static_assert(NcclConfig().magic == kInitial.magic &&
              NcclConfig().most_blocks == NCCL_CONFIG_UNDEF_INT);
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int) &&
              sizeof(ncclRedOp_t) == sizeof(int) && sizeof(ncclComm_t) == sizeof(void*));

}  // namespace shardwright
