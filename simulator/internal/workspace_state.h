#pragma once

#include <vector>

#include "schedule/repetition.h"
#include "simulator/engine.h"
#include "simulator/internal/engine_events.h"
#include "simulator/internal/engine_linear.h"
#include "simulator/internal/engine_state.h"

namespace shardwright {

struct EngineWorkspace::State {
  std::vector<internal::Cost> costs;
  internal::LinearState linear;
  internal::EventState events;
};

namespace internal {

// The two engines behind RunEngine; state.costs must be filled. `cuts` has what may be skipped.
// `spans`: see RunEngineWithSpans.
[[nodiscard]] EngineResult RunLinear(const Program& program, const Repetitions& cuts,
                                     const EngineOptions& options,
                                     EngineWorkspace::State& workspace, std::vector<Span>* spans);
[[nodiscard]] EngineResult RunEvents(const Program& program, const Repetitions& cuts,
                                     const PriceTable& prices, const EngineOptions& options,
                                     EngineWorkspace::State& state, std::vector<Span>* spans);

}  // namespace internal
}  // namespace shardwright
