#include "cli/straggler_flags.h"

#include <cstdint>
#include <system_error>

#include "core/portable.h"
#include "core/ranges.h"
#include "simulator/costs/pricer.h"

namespace shardwright {
namespace {

constexpr double kLargestFactor = 1000.0;
constexpr double kLargestSigma = 1.0;
constexpr std::int64_t kMostSamples = 1'000'000;
constexpr std::int64_t kMostSlowRanks = 65536;

// A number in (low, high], or nothing.
bool ReadNumber(const std::string& text, double low, double high, double& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = FromChars(text.data(), end, value);
  return error == std::errc() && stop == end && value > low && value <= high;
}

double ReadSigma(const Flag& flag) {
  double sigma = 0.0;
  if (!ReadNumber(flag.text, -1e-300, kLargestSigma, sigma)) {
    RefuseFlag(flag, "a number in [0, 1], such as 0.02");
  }
  return sigma;
}

}  // namespace

std::vector<SlowRank> ReadSlowRanks(const Flag& flag) {
  constexpr const char* kRule = "ranks and factors, such as 3:1.5 or 8..15:1.2";
  std::vector<SlowRank> slow;
  for (const std::string& part : ReadList(flag)) {
    const std::size_t colon = part.find(':');
    double factor = 0.0;
    if (colon == std::string::npos ||
        !ReadNumber(part.substr(colon + 1), 0.0, kLargestFactor, factor)) {
      RefuseFlag(flag, kRule);
    }
    const std::string ranks = part.substr(0, colon);
    const std::size_t dots = ranks.find("..");
    const std::int64_t first = ReadCount({flag.name, ranks.substr(0, dots)}, 0, kMaxRanks);
    const std::int64_t last = dots == std::string::npos
                                  ? first
                                  : ReadCount({flag.name, ranks.substr(dots + 2)}, 0, kMaxRanks);
    if (last < first || last - first >= kMostSlowRanks) {
      RefuseFlag(flag, kRule);
    }
    for (std::int64_t rank = first; rank <= last; ++rank) {
      if (IsIn(slow, rank, &SlowRank::rank)) {
        RefuseFlag(flag, "every rank once");
      }
      slow.push_back({rank, factor});
    }
  }
  return slow;
}

std::pair<std::string, double> ReadSlowLink(const Flag& flag) {
  const std::size_t colon = flag.text.find(':');
  double factor = 0.0;
  if (colon == std::string::npos || colon == 0 ||
      !ReadNumber(flag.text.substr(colon + 1), 0.0, kLargestFactor, factor)) {
    RefuseFlag(flag, "a level and a factor, such as network:2");
  }
  return {flag.text.substr(0, colon), factor};
}

StragglerFlags ReadStragglerFlags(const Arguments& arguments) {
  StragglerFlags flags;
  std::int64_t samples = flags.jitter.samples;
  arguments.Set("--jitter", flags.jitter.op_sigma, ReadSigma);
  arguments.Set("--rank-jitter", flags.jitter.rank_sigma, ReadSigma);
  arguments.Set("--slow-rank", flags.jitter.slow_ranks, ReadSlowRanks);
  const Flag links = arguments.Get("--slow-link");
  if (links.is_given()) {
    for (const std::string& part : ReadList(links)) {
      flags.slow_links.push_back(ReadSlowLink({links.name, part}));
    }
  }
  arguments.SetCount("--samples", kMostSamples, samples);
  flags.jitter.samples = static_cast<int>(samples);
  arguments.Set("--seed", flags.jitter.seed, [](const Flag& flag) {
    return static_cast<std::uint64_t>(ReadCount(flag, 0, std::int64_t{1} << 62));
  });
  flags.is_sampled = flags.jitter.op_sigma > 0.0 || flags.jitter.rank_sigma > 0.0 ||
                     !flags.jitter.slow_ranks.empty();
  for (const char* name : {"--samples", "--seed"}) {
    if (arguments.Get(name).is_given() && !flags.is_sampled) {
      throw UsageError(std::string(name) + " needs --jitter, --rank-jitter or --slow-rank");
    }
  }
  return flags;
}

StepDistribution SampleSteps(const PlanFile& file, const Program& program,
                             const SimulationResult& result, JitterOptions options) {
  options.ranks = file.cluster.RankCount();
  const auto last = static_cast<std::uint32_t>(result.timing.steps - 1);
  std::vector<Span> steady;
  for (const Span& span : result.trace.spans) {
    if (span.body == BodyKind::kStep && span.step == last) {
      steady.push_back(span);
    }
  }
  SortBy(steady, &Span::op);
  return SampleSteps(program, PriceProgram(program, file.cluster, file.profile), steady, options);
}

}  // namespace shardwright
