#include "executor/fp8.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

constexpr Fp8Format kFormats[] = {Fp8Format::kE4m3, Fp8Format::kE5m2};

// The value of an 8-bit float by the definition of its format, in fp64.
double ValueOf(std::uint8_t bits, Fp8Format format) {
  const int fraction_bits = format == Fp8Format::kE4m3 ? 3 : 2;
  const int bias = format == Fp8Format::kE4m3 ? 7 : 15;
  const int exponent = (bits & 0x7f) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x80) != 0 ? -1.0 : 1.0;
  if (format == Fp8Format::kE4m3 && (bits & 0x7f) == 0x7f) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (format == Fp8Format::kE5m2 && exponent == 31) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0
             ? sign * std::ldexp(fraction, 1 - bias - fraction_bits)
             : sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

TEST_CASE("every 8-bit float has the value that its format defines, and survives the way back") {
  for (const Fp8Format format : kFormats) {
    int wrong = 0;
    for (int i = 0; i < 256; ++i) {
      const auto bits = static_cast<std::uint8_t>(i);
      const double value = ValueOf(bits, format);
      const float read = Fp8ToFloat(bits, format);
      if (std::isnan(value)) {
        wrong +=
            std::isnan(read) && std::isnan(Fp8ToFloat(FloatToFp8(read, format), format)) ? 0 : 1;
      } else {
        const bool is_same = static_cast<double>(read) == value;
        // No infinity comes back: it becomes the largest number.
        wrong += is_same && (std::isinf(value) || FloatToFp8(read, format) == bits) ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
  }
}

// torch.from_numpy(x).clamp(-most, most).to(dtype) of PyTorch 2.13, whose bytes have this hash
// (FNV-1a): x are all bf16 numbers but NaNs, and the fp32 numbers just below, at and just above the
// middle between each and the next.
TEST_CASE("rounding to 8 bits has PyTorch's bits") {
  constexpr std::uint64_t kHashes[] = {0xfd247c4dbc681da3U, 0xd26f3cb3dd3210f3U};
  constexpr std::uint32_t kLows[] = {0, 0x7fff, 0x8000, 0x8001};
  for (const Fp8Format format : kFormats) {
    std::uint64_t hash = 0xcbf29ce484222325U;
    int apart = 0;
    for (std::uint32_t high = 0; high < 65536; ++high) {
      for (const std::uint32_t low : kLows) {
        const auto x = std::bit_cast<float>(high << 16U | low);
        if (std::isnan(x)) {
          continue;
        }
        const std::uint8_t bits = FloatToFp8(x, format);
        hash = (hash ^ bits) * 0x100000001b3U;
        // The same number without its bits, for products on the host.
        apart += RoundToFp8(x, Fp8ConstantsOf(format)) == Fp8ToFloat(bits, format) ? 0 : 1;
      }
    }
    CHECK(hash == kHashes[format == Fp8Format::kE4m3 ? 0 : 1]);
    CHECK(apart == 0);
    for (const std::uint32_t nan : {0x7fc00000U, 0x7fffffffU, 0xff800001U}) {
      CHECK(std::isnan(RoundToFp8(std::bit_cast<float>(nan), Fp8ConstantsOf(format))));
    }
  }
}

TEST_CASE("scales of 8-bit floats") {
  // 448 / 3.5 and 57344 / 3.5; powers of two not above them.
  CHECK(Fp8Scale(3.5F, Fp8Format::kE4m3, false) == 128.0F);
  CHECK(Fp8Scale(3.5F, Fp8Format::kE5m2, false) == 16384.0F);
  CHECK(Fp8Scale(3.0F, Fp8Format::kE4m3, false) == 448.0F / 3.0F);
  CHECK(Fp8Scale(3.0F, Fp8Format::kE4m3, true) == 128.0F);
  CHECK(Fp8Scale(3.5F, Fp8Format::kE4m3, true) == 128.0F);
  CHECK(Fp8Scale(3.6F, Fp8Format::kE4m3, true) == 64.0F);
  // As torchao: never a division by less than 1e-12.
  CHECK(Fp8Scale(0.0F, Fp8Format::kE4m3, false) == static_cast<float>(448.0 / 1e-12));
  CHECK(Fp8Scale(std::numeric_limits<float>::infinity(), Fp8Format::kE5m2, false) == 0.0F);
}

}  // namespace
}  // namespace shardwright
