// Compared at compile time where the header is installed: what executor/cuda/activity_log.h says
// about CUPTI without it.

#include <cstddef>

#include <cupti.h>

#include "executor/cuda/activity_log.h"

namespace shardwright {

static_assert(CuptiNumbers::kSuccess == CUPTI_SUCCESS);
static_assert(CuptiNumbers::kCopy == CUPTI_ACTIVITY_KIND_MEMCPY);
static_assert(CuptiNumbers::kFill == CUPTI_ACTIVITY_KIND_MEMSET);
static_assert(CuptiNumbers::kDriver == CUPTI_ACTIVITY_KIND_DRIVER);
static_assert(CuptiNumbers::kRuntime == CUPTI_ACTIVITY_KIND_RUNTIME);
static_assert(CuptiNumbers::kKernel == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
static_assert(CuptiNumbers::kPeerCopy == CUPTI_ACTIVITY_KIND_MEMCPY2);
static_assert(CuptiNumbers::kExternal == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION);
static_assert(CuptiNumbers::kCustom == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0);
static_assert(CuptiNumbers::kForced == CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);

// The records of the toolkit's version; those of others begin alike.
#if CUPTI_API_VERSION >= 130000
using TheirKernel = CUpti_ActivityKernel10;
using TheirCopy = CUpti_ActivityMemcpy6;
#else
using TheirKernel = CUpti_ActivityKernel9;
using TheirCopy = CUpti_ActivityMemcpy5;
#endif
using TheirPeerCopy = CUpti_ActivityMemcpyPtoP4;
using TheirFill = CUpti_ActivityMemset4;

template <class Ours, class Theirs>
constexpr bool AreAlike() {
  return sizeof(Ours) <= sizeof(Theirs) && offsetof(Ours, kind) == offsetof(Theirs, kind) &&
         offsetof(Ours, start) == offsetof(Theirs, start) &&
         offsetof(Ours, end) == offsetof(Theirs, end) &&
         offsetof(Ours, correlation) == offsetof(Theirs, correlationId) &&
         sizeof(Ours::start) == sizeof(Theirs::start) &&
         sizeof(Ours::correlation) == sizeof(Theirs::correlationId);
}
static_assert(AreAlike<CuptiKernel, TheirKernel>());
static_assert(AreAlike<CuptiCopy, TheirCopy>());
static_assert(AreAlike<CuptiCopy, TheirFill>());
static_assert(AreAlike<CuptiPeerCopy, TheirPeerCopy>());
static_assert(offsetof(CuptiExternal, external_kind) ==
              offsetof(CUpti_ActivityExternalCorrelation, externalKind));
static_assert(offsetof(CuptiExternal, external) ==
              offsetof(CUpti_ActivityExternalCorrelation, externalId));
static_assert(offsetof(CuptiExternal, correlation) ==
              offsetof(CUpti_ActivityExternalCorrelation, correlationId));
static_assert(sizeof(CuptiExternal) == sizeof(CUpti_ActivityExternalCorrelation));
static_assert(sizeof(CUptiResult) == sizeof(int) && sizeof(CUpti_ActivityKind) == sizeof(int) &&
              sizeof(CUpti_ExternalCorrelationKind) == sizeof(int));

}  // namespace shardwright
