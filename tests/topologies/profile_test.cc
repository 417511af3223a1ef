#include "topologies/profile.h"

#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

std::string ErrorOf(const std::string& text) {
  try {
    (void)ParseProfile(text, "p.json");
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

std::string Extension(const std::string& sections) {
  return R"({"format": "shardwright-profile", "version": 1, "name": "mine", "extends": "generic")" +
         sections + "}";
}

TEST_CASE("Profile: every shipped one reads back from its own JSON") {
  const std::vector<std::string> names = ListProfiles();
  CHECK(names.size() >= 6);
  for (const std::string& name : names) {
    CAPTURE(name);
    const Profile profile = LoadProfile(name);
    CHECK(profile.name == name);
    const std::string text = ProfileJson(profile);
    CHECK(ParseProfile(text, "again.json") == profile);
    CHECK(ProfileJson(ParseProfile(text, "again.json")) == text);
    for (const char* transport : {"nvlink", "pcie", "ib", "roce", "efa", "tcpx", "tcpxo"}) {
      CHECK(FindTransport(profile, transport).name == transport);
    }
    CHECK(FindTransport(profile, "carrier pigeon").name == "default");
  }
}

// Otherwise they would be priced as a library's, which is tens of times faster. Per multiprocessor
// and clock they are what one H200 reaches: 7.4 TFLOP/s of grouped products for 132 at 1.98 GHz,
// and no GPU of today has twice as many.
TEST_CASE("Profile: the executor's own kernels have rates on every GPU that runs them") {
  int seen = 0;
  for (const GpuSpec& gpu : GpuCatalog()) {
    const std::optional<FlopsPerSecond> peak = PeakFlops(gpu, MathType::kBf16);
    if (gpu.vendor != "nvidia" || !peak) {
      continue;
    }
    CAPTURE(gpu.name);
    ++seen;
    const ComputeProfile compute = DefaultProfile(gpu, "shardwright-cuda-plain").compute;
    CHECK(compute.own_grouped.value > 0);
    CHECK(compute.own_grouped.value * peak->value < 2 * 7.4e12);
    CHECK(compute.own_attention.forward.value * peak->value < 2 * 26.3e12);
    CHECK(compute.own_attention.backward.value > 0);
    CHECK(compute.own_attention.backward.value * peak->value < 2 * 15.6e12);
  }
  CHECK(seen > 20);
}

TEST_CASE("Profile: one fits each GPU and kernel set") {
  // One for all that runs PyTorch's kernels.
  for (const char* kernel_set : {"torch-eager", "torch-compile", "torch-2022", "hf-eager"}) {
    CHECK(DefaultProfile(FindGpu("h100-80", ""), kernel_set).name == "h100-80-torch");
    CHECK(DefaultProfile(FindGpu("h200-141", ""), kernel_set).name == "hopper-torch");
  }
  CHECK(DefaultProfile(FindGpu("a100-80", ""), "hf-foak").name == "a100-80-hf-foak");
  CHECK(DefaultProfile(FindGpu("h100-80", ""), "jax-xla").name == "h100-torch-eager");
  CHECK(DefaultProfile(FindGpu("rtx-5090", ""), "torch-compile").name ==
        "blackwell-rtx-half-torch-eager");
  // Cards that add in fp32 at half rate, and their siblings that do not.
  CHECK(DefaultProfile(FindGpu("rtx-4090", ""), "torch-eager").name == "ada-half-torch-eager");
  CHECK(DefaultProfile(FindGpu("l20", ""), "torch-eager").name == "ada-half-torch-eager");
  CHECK(DefaultProfile(FindGpu("l40s", ""), "torch-eager").name == "ada-torch-eager");
  CHECK(DefaultProfile(FindGpu("rtx-3090", ""), "torch-eager").name == "ampere-half-torch");
  CHECK(DefaultProfile(FindGpu("rtx-a6000", ""), "torch-eager").name == "ampere-torch");
  CHECK(DefaultProfile(FindGpu("rtx-pro-6000", ""), "torch-eager").name ==
        "blackwell-rtx-torch-eager");
  CHECK(DefaultProfile(FindGpu("a100-40", ""), "composer-2023").name == "a100-torch-eager");
  CHECK(DefaultProfile(FindGpu("b200-180", ""), "torch-compile").name == "b200-torch-eager");
  CHECK(DefaultProfile(FindGpu("b200-180-limited", ""), "torch-eager").name ==
        "b200-180-limited-torch");
  CHECK(DefaultProfile(FindGpu("gb200-186", ""), "torch-eager").name == "gb200-torch-eager");
  CHECK(DefaultProfile(FindGpu("v100-32", ""), "torch-eager").name == "v100-torch-eager");
  CHECK(DefaultProfile(FindGpu("mi300x", ""), "torch-eager").name == "mi300x-torch");
  CHECK(DefaultProfile(FindGpu("mi300x", ""), "jax-xla").name == "cdna3-torch-eager");
  CHECK(DefaultProfile(FindGpu("mi355x", ""), "torch-eager").name == "cdna4-torch");
  CHECK(DefaultProfile(FindGpu("mi250x", ""), "torch-eager").name == "generic");
  CHECK(DefaultProfile(FindGpu("h100-80", ""), "shardwright-cuda").name == "h100-shardwright-cuda");
  CHECK(DefaultProfile(FindGpu("h200-141", ""), "shardwright-cuda-plain").name ==
        "h200-shardwright-cuda");
  GpuSpec unknown;
  unknown.architecture = "new-architecture";
  CHECK(DefaultProfile(unknown, "torch-eager").name == "generic");
}

TEST_CASE("Profile: V100 has no bf16, and extends does not lend it one") {
  const Profile v100 = LoadProfile("v100-torch-eager");
  CHECK_FALSE(v100.compute.gemm[static_cast<std::size_t>(MathType::kBf16)].has_value());
  CHECK(v100.compute.gemm[static_cast<std::size_t>(MathType::kFp16)].has_value());
}

TEST_CASE("Profile: extends takes everything that is not said") {
  const Profile base = LoadProfile("generic");
  const Profile mine = ParseProfile(
      Extension(R"(, "host": {"wake": {"value": "7 us", "kind": "measured", "source": "here",
                   "date": "2026-11-21", "spread": 0.2}},
                   "transports": {"ib": {"protocols": {"LL": {"hop_latency": {"value": "3 us",
                   "kind": "measured", "source": "here", "date": "2026-11-21"}}}}})"),
      "p.json");
  CHECK(mine.name == "mine");
  CHECK(mine.host.wake.value == Seconds(7e-6));
  CHECK(mine.host.wake.spread == 0.2);
  CHECK(mine.host.wake.origin.kind == NumberKind::kMeasured);
  CHECK(mine.host.malloc == base.host.malloc);
  CHECK(mine.compute == base.compute);
  const TransportProfile& ib = FindTransport(mine, "ib");
  CHECK(ib.efficiency == FindTransport(base, "ib").efficiency);
  REQUIRE(ib.protocols.size() == 3);
  CHECK(ib.protocols[0].name == "LL");
  CHECK(ib.protocols[0].hop_latency.value == Seconds(3e-6));
  CHECK(ib.protocols[0].base_latency == FindTransport(base, "ib").protocols[0].base_latency);
}

TEST_CASE("Profile: whole error texts") {
  CHECK(ErrorOf(R"({"format": "shardwright-profile", "version": 1, "name": "x"})") ==
        "p.json: got no key \"compute\", expected one");
  CHECK(ErrorOf(R"({"format": "shardwright-profile", "version": 1, "name": "x",
                    "extends": "generik"})") ==
        "p.json: extends: got \"generik\", expected the name of a shipped profile; did you mean "
        "\"generic\"?");
  CHECK(ErrorOf(Extension(R"(, "hosts": {})")) ==
        "p.json: got unknown key \"hosts\", expected one of \"format\", \"version\", \"name\", "
        "\"description\", \"extends\", \"architecture\", \"kernel_set\", \"fit\", \"compute\", "
        "\"host\", \"copy\", \"transports\", \"overlap\", \"memory\"; did you mean \"host\"?");
  CHECK(ErrorOf(Extension(R"(, "copy": {"bandwidth": "7 us"})")) ==
        "p.json: copy: got unknown key \"bandwidth\", expected one of \"kind\", \"source\", "
        "\"date\", "
        "\"to_device\", \"to_host\", \"both_ways\", \"latency\"");
  CHECK(ErrorOf(Extension(R"(, "host": {"wake": "7 us"})")) ==
        "p.json: host.wake: got \"7 us\", expected a number with \"kind\", \"source\" and "
        "\"date\"");
  CHECK(ErrorOf(Extension(R"(, "host": {"kind": "assumed", "source": "me", "date": "2026-11-21",
                              "wake": 7})")) ==
        "p.json: host.wake: got 7, expected a time such as \"5 us\" or \"1.5 ms\"");
  CHECK(ErrorOf(Extension(R"(, "copy": {"kind": "assumed", "source": "me", "date": "2026-11-21",
                              "to_host": 1.5})")) ==
        "p.json: copy.to_host: got 1.5, expected above 0, at most 1");
  CHECK(ErrorOf(Extension(R"(, "compute": {"kind": "assumed", "source": "me",
                              "date": "2026-11-21", "gemm": {"bf16": 0}})")) ==
        "p.json: compute.gemm.bf16: got 0, expected above 0, at most 1");
  CHECK(ErrorOf(Extension(R"(, "compute": {"kind": "assumed", "source": "me",
                              "date": "2026-11-21", "cudnn_attention_forward": 0.5})")) ==
        "p.json: compute: got "
        "{\"cudnn_attention_forward\":0.5,\"date\":\"2026-11-21\",\"kind\"..., expected both "
        "cudnn_attention_forward and cudnn_attention_backward, or none");
  CHECK(ErrorOf(Extension(R"(, "compute": {"kind": "assumed", "source": "me",
                              "date": "2026-11-21", "attention_start": 1001})")) ==
        "p.json: compute.attention_start: got 1001, expected a number from 0 to 1000");
  CHECK(ErrorOf(Extension(R"(, "overlap": {"kind": "assumed", "source": "me",
                              "date": "2026-11-21", "compute_sensitivity": 11})")) ==
        "p.json: overlap.compute_sensitivity: got 11, expected from 0 to 10");
  CHECK(ErrorOf(Extension(R"(, "transports": {"mine": {}})")) ==
        "p.json: transports.mine: got no key \"efficiency\", expected one");
  std::string unknown;
  try {
    (void)LoadProfile("h100-torch-eagre");
  } catch (const InputError& e) {
    unknown = e.what();
  }
  CHECK(unknown ==
        "profile: got \"h100-torch-eagre\", expected a name from `shardwright list profiles` or a "
        ".json file; did you mean \"h100-torch-eager\"?");
}

TEST_CASE("Profile: choice, overlap and split messages are optional and checked") {
  const Profile mine = ParseProfile(
      Extension(R"(, "transports": {"efa": {"choice": "nccl", "overlap": {"value": 3, "kind":
          "assumed", "source": "me", "date": "2026-11-21"}}, "opa": {"split_above": {"value": "4096 B",
          "kind": "assumed", "source": "me", "date": "2026-11-21"}}})"),
      "p.json");
  const TransportProfile& efa = FindTransport(mine, "efa");
  CHECK(efa.choice == CollectiveChoice::kNccl);
  CHECK(efa.overlap.value == 3);
  CHECK(FindTransport(mine, "opa").split_above.value == Bytes(4096));
  CHECK(FindTransport(mine, "pcie").overlap.value == 1);  // generic gives none
  CHECK(mine.host.library_call.value == Seconds(0));
  CHECK(ParseProfile(ProfileJson(mine), "again.json") == mine);
  const auto with_overlap = [](const char* value) {
    return ErrorOf(Extension(std::string(R"(, "transports": {"efa": {"overlap": {"value": )") +
                             value +
                             R"(, "kind": "assumed", "source": "me", "date": "2026-11-21"}}})"));
  };
  CHECK(with_overlap("0.5") ==
        "p.json: transports.efa.overlap: got {\"date\":\"2026-11-21\",\"kind\":\"assumed\","
        "\"source\":\"me\",\"valu..., expected from 1 to 10");
  const Profile reduced = ParseProfile(
      Extension(
          R"(, "transports": {"opa": {"all_reduce_choice": "nccl", "all_reduce_protocols": ["LL"],
          "all_reduce_gain": {"value": 0.5, "kind": "assumed", "source": "me", "date": "2026-11-28"},
          "tree_chunk": {"value": "64 KiB", "kind": "assumed", "source": "me", "date": "2026-11-28"}}})"),
      "p.json");
  const TransportProfile& opa = FindTransport(reduced, "opa");
  CHECK(opa.all_reduce_choice == CollectiveChoice::kNccl);
  CHECK(opa.all_reduce_protocols == std::vector<std::string>{"LL"});
  CHECK(opa.all_reduce_gain.value == 0.5);
  CHECK(opa.tree_chunk.value == Bytes(65536));
  CHECK(FindTransport(reduced, "pcie").all_reduce_choice == std::nullopt);
  CHECK(ParseProfile(ProfileJson(reduced), "again.json") == reduced);
  CHECK(ErrorOf(Extension(R"(, "transports": {"efa": {"choice": "ncl"}})")) ==
        "p.json: transports.efa.choice: got \"ncl\", expected one of \"cheapest\", \"nccl\"; did "
        "you mean "
        "\"nccl\"?");
}

}  // namespace
}  // namespace shardwright
