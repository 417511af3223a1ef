#pragma once

// Numbers with origin as JSON. A number is either an object
//   {"value": "450 GB/s", "kind": "spec", "source": "...", "date": "2026-11-21", "spread": 0.05}
// or the bare value, which then has the origin of the object around it:
//   {"kind": "spec", "source": "...", "date": "...", "memory": "80 GB", ...}

#include <cstdint>
#include <optional>

#include <nlohmann/json_fwd.hpp>

#include "core/json.h"
#include "topologies/number.h"

namespace shardwright::internal {

using OrderedJson = nlohmann::ordered_json;

// The keys "kind", "source" and "date" of `object`; `outer` when it has none of them. All three or
// none must be there. Nothing when there is no outer origin either.
[[nodiscard]] std::optional<Origin> ReadOrigin(const JsonValue& object,
                                               const std::optional<Origin>& outer);

// How the bare value of each T is read.
void ReadBare(const JsonValue& value, Bytes& out);
void ReadBare(const JsonValue& value, BytesPerSecond& out);
void ReadBare(const JsonValue& value, FlopsPerSecond& out);
void ReadBare(const JsonValue& value, Seconds& out);
void ReadBare(const JsonValue& value, std::int64_t& out);
void ReadBare(const JsonValue& value, double& out);  // in [0, 1000]

// Throws InputError when a number has no origin.
template <class T>
[[nodiscard]] Number<T> ReadNumber(const JsonValue& value, const std::optional<Origin>& outer);

template <class T>
[[nodiscard]] OrderedJson NumberJson(const Number<T>& number);

void WriteOrigin(OrderedJson& object, const Origin& origin);

// `object` with two spaces of indentation, except that arrays and objects without inner ones stay
// on one line; ends with a newline.
[[nodiscard]] std::string PrettyJson(const OrderedJson& object);

}  // namespace shardwright::internal
