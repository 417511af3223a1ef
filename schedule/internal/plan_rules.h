#pragma once

// What the lists of schedule/plan_parts.json ask of the fields of a plan file: fields(part, visit)
// calls visit(key, member, rule), or visit(key, part, its fields).

#include <cstdint>

#include "core/json.h"
#include "models/trainable.h"
#include "schedule/internal/check_plan.h"
#include "schedule/plan_names.h"

namespace shardwright::internal {

// What may stand in a field. A file may leave out what is not needed: the default holds then.
struct Rule {
  NameList names = {};                       // of an enumerator
  std::int64_t least = 0;                    // of an integer
  std::int64_t most = JsonValue::kMaxCount;  // likewise
  bool (*holds)(double number) = nullptr;    // of a number with a fraction
  const char* expected = "";                 // what an error says where that is false
  bool is_needed = false;
  bool is_written = true;
};

inline bool IsFraction(double number) {
  return number >= 0.0 && number < 1.0;
}
inline bool IsAlpha(double number) {
  return number > 0.0 && number <= kMaxLoraAlpha;
}

inline constexpr auto kRolloutFields = [](auto& rollout, auto& visit) {
  visit("completion", rollout.completion, {.most = std::int64_t{1} << 30});
  visit("generations", rollout.generations, {.least = 2, .most = kMaxAccumulation});
  visit("updates", rollout.updates, {.least = 1, .most = kMaxAccumulation});
  visit("batches", rollout.batches, {.most = kMaxAccumulation});
  visit("has_old", rollout.has_old);
  visit("has_reference", rollout.has_reference);
  visit("engine", rollout.engine, {.holds = IsFraction, .expected = "a fraction in [0, 1)"});
  visit("sleeps", rollout.sleeps);
  visit("by_trainer", rollout.by_trainer);
  visit("seconds", rollout.seconds,
        {.holds = [](double s) { return s >= 0 && s <= kMaxGeneration; },
         .expected = "seconds, at most 1e6"});
};

}  // namespace shardwright::internal
