#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"

namespace shardwright {
namespace {

std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

std::string BytesError(const std::string& text) {
  return ErrorOf([&] { (void)ParseBytes(text, "here"); });
}
std::string RateError(const std::string& text) {
  return ErrorOf([&] { (void)ParseBytesPerSecond(text, "here"); });
}
std::string TimeError(const std::string& text) {
  return ErrorOf([&] { (void)ParseSeconds(text, "here"); });
}

// Expected values: the definitions of the units (1 GB = 1e9 B, 1 GiB = 2^30 B, 8 bits a byte).
TEST_CASE("Quantity: sizes") {
  CHECK(ParseBytes("0 B", "") == Bytes(0));
  CHECK(ParseBytes("80 GiB", "") == Bytes(85899345920));
  CHECK(ParseBytes("80GiB", "") == Bytes(85899345920));
  CHECK(ParseBytes("80 GB", "") == Bytes(80000000000));
  CHECK(ParseBytes("0.5 KiB", "") == Bytes(512));
  CHECK(ParseBytes("1.5 TB", "") == Bytes(1500000000000));
  CHECK(ParseBytes("1e3 MB", "") == Bytes(1000000000));
  CHECK(ParseBytes("79.19 GiB", "") == Bytes(std::llround(79.19 * 1073741824.0)));
  // 2^53 + 1 has no double: whole bytes are read as integers.
  CHECK(ParseBytes("9007199254740993 B", "") == Bytes(9007199254740993));
}

TEST_CASE("Quantity: rates and times") {
  CHECK(ParseBytesPerSecond("450 GB/s", "") == BytesPerSecond(450e9));
  CHECK(ParseBytesPerSecond("400 Gbit/s", "") == BytesPerSecond(50e9));
  CHECK(ParseBytesPerSecond("3.35 TB/s", "") == BytesPerSecond(3.35e12));
  CHECK(ParseBytesPerSecond("1 KiB/s", "") == BytesPerSecond(1024));
  CHECK(ParseFlopsPerSecond("989 TFLOP/s", "") == FlopsPerSecond(989e12));
  CHECK(ParseSeconds("5 us", "") == Seconds(5e-6));
  CHECK(ParseSeconds("83.1 us", "") == Seconds(83.1e-6));
  CHECK(ParseSeconds("250 ns", "") == Seconds(250e-9));
  CHECK(ParseSeconds("7 ps", "") == Seconds(7e-12));
  CHECK(ParseSeconds("1.5 ms", "") == Seconds(1.5e-3));
  CHECK(ParseSeconds("2 min", "") == Seconds(120));
  CHECK(ParseSeconds("2 h", "") == Seconds(7200));
}

TEST_CASE("Quantity: what is refused, whole texts") {
  const std::string size = "expected a size such as \"80 GiB\" or \"512 MB\"";
  const std::string rate = "expected a rate such as \"50 GB/s\" or \"400 Gbit/s\"";
  const std::string time = "expected a time such as \"5 us\" or \"1.5 ms\"";
  CHECK(BytesError("80") == "here: got \"80\", " + size + "; the unit is missing");
  CHECK(BytesError("80 Gib") == "here: got \"80 Gib\", " + size + "; did you mean \"GiB\"?");
  CHECK(BytesError("80 GB/s") == "here: got \"80 GB/s\", " + size + "; did you mean \"GB\"?");
  CHECK(BytesError("-1 GiB") == "here: got \"-1 GiB\", " + size + "; it must not be negative");
  CHECK(BytesError("") == "here: got \"\", " + size);
  CHECK(BytesError("GiB") == "here: got \"GiB\", " + size);
  CHECK(BytesError("inf GiB") == "here: got \"inf GiB\", " + size);
  CHECK(BytesError("nan GiB") == "here: got \"nan GiB\", " + size);
  CHECK(BytesError("1e999 GiB") ==
        "here: got \"1e999 GiB\", " + size + "; the number is out of range");
  CHECK(BytesError("1e30 GiB") == "here: got \"1e30 GiB\", " + size + "; it is too large");
  CHECK(BytesError("0.5 B") == "here: got \"0.5 B\", " + size + "; a byte has no fraction");
  CHECK(BytesError("80 GiB ") == "here: got \"80 GiB \", " + size + "; did you mean \"GiB\"?");
  CHECK(RateError("400 Gb/s") ==
        "here: got \"400 Gb/s\", " + rate +
            "; write \"Gbit/s\" for bits or \"GB/s\" for bytes per second");
  CHECK(RateError("400 Gbps") ==
        "here: got \"400 Gbps\", " + rate +
            "; write \"Gbit/s\" for bits or \"GB/s\" for bytes per second");
  CHECK(RateError("400 gbit/s") ==
        "here: got \"400 gbit/s\", " + rate + "; did you mean \"bit/s\"?");
  CHECK(TimeError("5") == "here: got \"5\", " + time + "; the unit is missing");
  CHECK(TimeError("5 sec") == "here: got \"5 sec\", " + time + "; did you mean \"s\"?");
  CHECK(ErrorOf([] { (void)ParseFlopsPerSecond("989 TFLOPS", "here"); }) ==
        "here: got \"989 TFLOPS\", expected a rate such as \"989 TFLOP/s\"; did you mean "
        "\"TFLOP/s\"?");
  CHECK(BytesError(std::string(100, '9')) ==
        "here: got \"" + std::string(60, '9') + "...\", " + size + "; the unit is missing");
}

// Expected by the rule: two decimals below 10, one below 100, none above, no trailing zeros.
TEST_CASE("Quantity: human forms") {
  CHECK(Format(Bytes(0)) == "0 B");
  CHECK(Format(Bytes(1023)) == "1023 B");
  CHECK(Format(Bytes(1000)) == "1000 B");
  CHECK(Format(Bytes(1536)) == "1.5 KiB");
  CHECK(Format(Bytes(std::int64_t{5} << 28)) == "1.25 GiB");
  CHECK(Format(Bytes(std::int64_t{80} << 30)) == "80 GiB");
  CHECK(Format(Bytes(1048575)) == "1 MiB");
  CHECK(Format(Bytes(-1536)) == "-1.5 KiB");
  CHECK(Format(Seconds(83.1e-6)) == "83.1 us");
  CHECK(Format(Seconds(0)) == "0 s");
  CHECK(Format(Seconds(0.9999)) == "1 s");
  CHECK(Format(Seconds(1.005)) == "1 s");
  CHECK(Format(Seconds(2.346)) == "2.35 s");
  CHECK(Format(Seconds(90)) == "90 s");
  CHECK(Format(Seconds(150)) == "2.5 min");
  CHECK(Format(Seconds(9000)) == "2.5 h");
  CHECK(Format(Seconds(3.6e303)) == "1e+300 h");  // longer than any buffer for its digits
  CHECK(Format(BytesPerSecond(450e9)) == "450 GB/s");
  CHECK(Format(BytesPerSecond(12.5e9)) == "12.5 GB/s");
  CHECK(Format(BytesPerSecond(3.35e12)) == "3.35 TB/s");
  CHECK(Format(FlopsPerSecond(989e12)) == "989 TFLOP/s");
  CHECK(Format(FlopsPerSecond(std::numeric_limits<double>::infinity())) == "infinite FLOP/s");
}

TEST_CASE("Quantity: exact forms read back to the same value") {
  CHECK(FormatExact(Bytes(std::int64_t{80} << 30)) == "80 GiB");
  CHECK(FormatExact(Bytes(1152 * (std::int64_t{1} << 30))) == "1.125 TiB");
  CHECK(FormatExact(Bytes(80'000'000'000)) == "80 GB");
  CHECK(FormatExact(Bytes(85899345921)) == "85899345921 B");
  CHECK(FormatExact(Bytes(0)) == "0 B");
  CHECK(FormatExact(BytesPerSecond(450e9)) == "450 GB/s");
  CHECK(FormatExact(BytesPerSecond(3.35e12)) == "3.35 TB/s");
  CHECK(FormatExact(BytesPerSecond(0)) == "0 B/s");
  CHECK(FormatExact(FlopsPerSecond(989e12)) == "989 TFLOP/s");
  CHECK(FormatExact(Seconds(83.1e-6)) == "83.1 us");
  CHECK(FormatExact(Seconds(0)) == "0 s");
  CHECK(FormatExact(Seconds(1.5)) == "1.5 s");
  std::uint64_t state = 1;  // a fixed linear congruential sequence (Knuth's MMIX constants)
  for (int i = 0; i < 2000; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const double unit = static_cast<double>(state >> 11) * 0x1p-53;
    const double v = std::exp(unit * 60.0 - 30.0);
    CAPTURE(v);
    const Bytes b(static_cast<std::int64_t>(state >> (2 + (i % 60))));
    CHECK(ParseBytes(FormatExact(b), "") == b);
    CHECK(ParseSeconds(FormatExact(Seconds(v * 1e-8)), "") == Seconds(v * 1e-8));
    CHECK(ParseBytesPerSecond(FormatExact(BytesPerSecond(v)), "") == BytesPerSecond(v));
    CHECK(ParseFlopsPerSecond(FormatExact(FlopsPerSecond(v)), "") == FlopsPerSecond(v));
  }
}

// A human form has at least three significant digits, so reading it back is within half of the
// third.
TEST_CASE("Quantity: reading a human form back is within 0.5 percent") {
  constexpr double kHalfOfThirdDigit = 0.005;
  for (double v = 1; v < 1e15; v *= 1.37) {
    CAPTURE(v);
    const Bytes b(std::llround(v));
    const double read = static_cast<double>(ParseBytes(Format(b), "").value);
    CHECK(std::abs(read - static_cast<double>(b.value)) <=
          kHalfOfThirdDigit * static_cast<double>(b.value));
    const BytesPerSecond r(v);
    CHECK(std::abs(ParseBytesPerSecond(Format(r), "").value - v) <= kHalfOfThirdDigit * v);
    const Seconds s(v * 1e-10);
    CHECK(std::abs(ParseSeconds(Format(s), "").value - s.value) <= kHalfOfThirdDigit * s.value);
  }
}

}  // namespace
}  // namespace shardwright
