#include "topologies/internal/number_json.h"

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/date.h"
#include "core/ordered_json.h"
#include "core/ranges.h"

namespace shardwright {

namespace {
constexpr std::array<std::string_view, 6> kKinds = {"spec",   "published",  "measured",
                                                    "fitted", "unverified", "assumed"};
}  // namespace

const char* NumberKindName(NumberKind kind) {
  return kKinds[static_cast<std::size_t>(kind)].data();
}

namespace internal {
namespace {

template <class T>
OrderedJson Bare(T value) {
  if constexpr (requires { FormatExact(value); }) {
    return FormatExact(value);
  } else {
    return value;
  }
}

bool IsFlat(const OrderedJson& value, std::size_t /*indent*/) {
  return NoneOf(value, &OrderedJson::is_structured);
}

}  // namespace

std::optional<Origin> ReadOrigin(const JsonValue& object, const std::optional<Origin>& outer) {
  if (!object.Find("kind") && !object.Find("source") && !object.Find("date")) {
    return outer;
  }
  Origin origin;
  origin.kind = static_cast<NumberKind>(object.At("kind").AsChoice(kKinds));
  origin.source = object.At("source").AsString();
  if (origin.source.empty()) {
    throw object.At("source").Error("where the numbers come from");
  }
  origin.date = object.At("date").AsString();
  const bool may_be_undated = origin.kind == NumberKind::kAssumed && origin.date.empty();
  if (!may_be_undated && !IsDate(origin.date)) {
    throw object.At("date").Error("a date such as \"2026-11-21\"");
  }
  return origin;
}

void ReadBare(const JsonValue& value, Bytes& out) {
  out = value.AsBytes();
}
void ReadBare(const JsonValue& value, BytesPerSecond& out) {
  out = value.AsBytesPerSecond();
}
void ReadBare(const JsonValue& value, FlopsPerSecond& out) {
  out = value.AsFlopsPerSecond();
}
void ReadBare(const JsonValue& value, Seconds& out) {
  out = value.AsSeconds();
}
void ReadBare(const JsonValue& value, std::int64_t& out) {
  out = value.AsInt(0, 1000000);
}

void ReadBare(const JsonValue& value, double& out) {
  constexpr double kLargest = 1000;  // fractions and small factors
  out = value.IsNumber() ? value.AsDouble() : -1;
  if (!(out >= 0 && out <= kLargest)) {
    throw value.Error("a number from 0 to 1000");
  }
}

template <class T>
Number<T> ReadNumber(const JsonValue& value, const std::optional<Origin>& outer) {
  Number<T> number;
  std::optional<Origin> origin = outer;
  if (value.IsObject()) {
    value.AllowOnly({"value", "kind", "source", "date", "spread"});
    ReadBare(value.At("value"), number.value);
    origin = ReadOrigin(value, outer);
    if (const auto spread = value.Find("spread")) {
      ReadBare(*spread, number.spread);
    }
  } else {
    ReadBare(value, number.value);
  }
  if (!origin) {
    throw value.Error("a number with \"kind\", \"source\" and \"date\"");
  }
  number.origin = *origin;
  return number;
}

void WriteOrigin(OrderedJson& object, const Origin& origin) {
  object["kind"] = NumberKindName(origin.kind);
  object["source"] = origin.source;
  object["date"] = origin.date;
}

template <class T>
OrderedJson NumberJson(const Number<T>& number) {
  OrderedJson object = OrderedJson::object();
  object["value"] = Bare(number.value);
  WriteOrigin(object, number.origin);
  if (number.spread != 0) {
    object["spread"] = number.spread;
  }
  return object;
}

std::string PrettyJson(const OrderedJson& object) {
  return PrintedJson(object, IsFlat) + '\n';
}

template Number<Bytes> ReadNumber(const JsonValue&, const std::optional<Origin>&);
template Number<BytesPerSecond> ReadNumber(const JsonValue&, const std::optional<Origin>&);
template Number<FlopsPerSecond> ReadNumber(const JsonValue&, const std::optional<Origin>&);
template Number<Seconds> ReadNumber(const JsonValue&, const std::optional<Origin>&);
template Number<std::int64_t> ReadNumber(const JsonValue&, const std::optional<Origin>&);
template Number<double> ReadNumber(const JsonValue&, const std::optional<Origin>&);
template OrderedJson NumberJson(const Number<Bytes>&);
template OrderedJson NumberJson(const Number<BytesPerSecond>&);
template OrderedJson NumberJson(const Number<FlopsPerSecond>&);
template OrderedJson NumberJson(const Number<Seconds>&);
template OrderedJson NumberJson(const Number<std::int64_t>&);
template OrderedJson NumberJson(const Number<double>&);

}  // namespace internal
}  // namespace shardwright
