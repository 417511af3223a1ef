#pragma once

// Expert parallel: `ranks` ranks next to each other share the experts of every mixture. Each has an
// equal part of the experts, and sends its tokens to where their experts are.
//
//   before  x, router -> experts (128 of them)                                         -> y
//   after   x, router -> dispatch -> exchange -> experts (16, on the rows that came)
//                     -> exchange -> combine (with the router's weights)                -> y
//
// Example: 8 ranks, 128 experts of which a token takes 8, 4,096 tokens a rank. A rank copies its
// tokens to 32,768 rows and sends seven eighths of them away. It gets as many back for its 16
// experts. The results go home the same way. Every expert is taken to have as many tokens as any
// other. What a run's routers choose differs; MostRows is the most that can come: all 8 ranks'
// tokens, each with all 8 chosen experts here, 262,144 rows. Nothing is ever dropped.
//
// Source: torchtitan, models/common/token_dispatcher.py (AllToAllTokenDispatcher), 2026-08-21.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "models/model.h"

namespace shardwright {

// Makes the model that the first of `ranks` ranks has: parameters of the first experts alone
// (Parameter::parts says of how many), and the ops above in place of each kExperts. Nothing changes
// for one rank, or where the model is cut so already. `where` names the source of `ranks`. Throws
// InputError for a model without experts, for a number of experts that `ranks` does not divide, and
// for experts that share a parameter. O(ops + parameters).
void CutExperts(Model& model, std::int64_t ranks, const std::string& where);

// Rows of op `op`, per sample, where all ranks' tokens choose as many of one rank's experts as they
// can: of experts on routed rows, and of the exchange before them. 0: another op.
[[nodiscard]] std::int64_t MostRows(const Model& model, std::size_t op);

// Access::index of what an all-to-all of rows sends.
inline constexpr std::uint16_t kToExperts = 0, kFromExperts = 1;

// The name of the parameter that the rank with part `part` of the experts has in the place of
// `param`: "experts.1.w1.weight" is "experts.5.w1.weight" in part 2 where a rank has two experts.
// Throws InputError where parameters are not named so.
[[nodiscard]] std::string FqnOfPart(const Model& model, ParamId param, std::int64_t part);

// All parameters of the whole model as (parameter here, part), in the whole model's order.
[[nodiscard]] std::vector<std::pair<ParamId, std::int64_t>> AllParts(const Model& model);

// The innermost module that all parameters of the experts of op `i` lie in: what frameworks give a
// unit of its own.
[[nodiscard]] ModuleId ExpertsModule(const Model& model, const ModelOp& op);

}  // namespace shardwright
