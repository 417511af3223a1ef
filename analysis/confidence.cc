#include "analysis/confidence.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "analysis/bands.h"
#include "analysis/predict_run.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/text.h"
#include "topologies/profile_fit.h"
#include "topologies/profile_targets.h"

namespace shardwright {
namespace {

// Whether the numbers are those that ship under the profile's name, but for the network and memory:
// old stacks change latencies and communicators (bench/lab/jobs.py), of which nothing was fitted
// to steps.
bool IsShipped(const Profile& profile) {
  const std::vector<std::string> names = ListProfiles();
  if (!std::binary_search(names.begin(), names.end(), profile.name)) {
    return false;
  }
  const Profile shipped = LoadProfile(profile.name);
  return shipped.compute == profile.compute && shipped.host == profile.host &&
         shipped.copy == profile.copy && shipped.overlap == profile.overlap;
}

// Published ones.
std::string Runs(std::int64_t count) {
  return std::to_string(count) + (count == 1 ? " run" : " runs");
}

// What is known of the stack: nothing, or what the profile's numbers come from.
struct Known {
  bool is_own = false;  // the user's profile
  std::optional<ProfileFit> fit;
  bool on_this_gpu = false;
};

Known KnownOf(const PlanFile& file) {
  Known known;
  known.is_own = !IsShipped(file.profile);
  if (!known.is_own) {
    known.fit = FitOf(file.profile.name);
    known.on_this_gpu = known.fit && known.fit->gpu == file.cluster.gpu.name;
  }
  return known;
}

std::string TextOf(const PlanFile& file, const Known& known) {
  const std::string& kernels = file.kernels.name;
  const std::string gpu = PrintableLine(file.cluster.gpu.name);
  if (known.is_own) {
    return "profile " + PrintableLine(file.profile.name) + " is your own";
  }
  if (!known.on_this_gpu) {
    const std::string text = "no run of " + kernels + " on " + gpu + " is known";
    return known.fit ? text + ", " + Runs(known.fit->RunCount()) + " on " + known.fit->gpu : text;
  }
  const std::int64_t count = known.fit->RunCount(), of_it = known.fit->RunCount(kernels);
  const std::string verb = count == 1 ? " is known" : " are known";
  return Runs(count) + " on " + gpu + verb +
         (of_it == count ? ""
                         : ", " + (of_it == 0 ? std::string("none") : std::to_string(of_it)) +
                               " of " + kernels);
}

// Of a normal error with a mean absolute value of 1: the half-width that holds 90 % of it,
// 1.6449 / sqrt(2 / pi).
constexpr double kBandPerMeanError = 2.0616;

// Was any shipped profile fitted to steps of which this is true?
template <class Test>
bool HasFit(Test is_true) {
  const std::vector<std::string> names = ListProfiles();
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    const std::optional<ProfileFit> fit = FitOf(name);
    return fit && is_true(*fit);
  });
}

// How far the plan is from what steps are known of; cards that add at half rate are chips of their
// own, of which no step is known.
std::string KindOf(const PlanFile& file, const Known& known) {
  if (file.profile.architecture.empty()) {
    return "generic";
  }
  const GpuSpec& gpu = file.cluster.gpu;
  const bool knows_chip =
      known.on_this_gpu || (ProfileTargets(gpu).size() == 2 && HasFit([&](const ProfileFit& fit) {
                              return FindGpu(fit.gpu, "bands").architecture == gpu.architecture;
                            }));
  const bool knows_stack =
      HasFit([&](const ProfileFit& fit) { return fit.RunCount(file.kernels.name) > 0; });
  return knows_chip ? (knows_stack ? "known" : "stack") : (knows_stack ? "chip" : "both");
}

double HalfWidth(const std::string& kind) {
  static const JsonValue data =
      JsonValue::Parse(EmbeddedBands().front().text, std::string(EmbeddedBands().front().path));
  return data.At("kinds").At(kind).At("half_width").AsDouble();
}

// The kind, and what was seen of such runs; the user's own profiles have no runs.
std::pair<std::string, double> LeastBand(const PlanFile& file, const Known& known,
                                         std::string_view source) {
  if (known.is_own) {
    return {"own", 0};
  }
  if (known.on_this_gpu && known.fit->Knows(source) && known.fit->RunCount(file.kernels.name) > 0) {
    return {"source", kBandPerMeanError * known.fit->left_out_error};
  }
  std::string kind = KindOf(file, known);
  for (const auto& [is_of, special] :
       {std::pair(file.plan.offload != Offload(), "offload"),
        std::pair(file.kernels.fp8 != Fp8Products::kNone, "fp8"),
        std::pair(ProfileTargets(file.cluster.gpu).size() > 2, "half rate"),
        std::pair(file.cluster.gpu.vendor != "nvidia", "other maker")}) {
    if (is_of && HalfWidth(special) > HalfWidth(kind)) {
      kind = special;
    }
  }
  return {kind, HalfWidth(kind)};
}

}  // namespace

std::string HowSure(const Confidence& confidence) {
  const std::string width = "within " + Fixed(100 * confidence.band, "%.1f %%") + "; ";
  return (confidence.kind == "own" ? width : "8 of 10 such runs are " + width) + confidence.text;
}

std::string ConfidenceText(const PlanFile& file) {
  return TextOf(file, KnownOf(file));
}

Confidence ConfidenceOf(const PlanFile& file, std::string_view source) {
  const Known known = KnownOf(file);
  const auto [kind, least] = LeastBand(file, known, source);
  return {TextOf(file, known), std::max(StepTimeBand(file), least), kind};
}

}  // namespace shardwright
