// The examples of docs/clusters.md are read as they stand there.

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/json.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

// The texts between ```<language> and ``` of a page, in order.
std::vector<std::string> Blocks(const std::string& page, const std::string& language) {
  std::vector<std::string> blocks;
  const std::string begin = "```" + language + "\n";
  for (std::size_t at = page.find(begin); at != std::string::npos; at = page.find(begin, at + 1)) {
    const std::size_t first = at + begin.size();
    blocks.push_back(page.substr(first, page.find("\n```", first) - first));
  }
  return blocks;
}

TEST_CASE("Docs: the examples of docs/clusters.md load") {
  const std::string page = ReadTextFile("../docs/clusters.md");
  const std::vector<std::string> lines = Blocks(page, "text");
  const std::vector<std::string> files = Blocks(page, "json");
  REQUIRE(lines.size() == 1);
  REQUIRE(files.size() == 2);
  const Cluster described = LoadCluster(lines[0]);
  CHECK(described.RankCount() == 512);
  CHECK(described.fabric.size() == 2);
  const Cluster box = ParseCluster(files[0], "docs/clusters.md");
  CHECK(box.RankCount() == 128);
  CHECK(FindRing(box, {128, 1}).Rate() == BytesPerSecond(50e9));  // two NICs of 200 Gbit/s
  const Profile profile = ParseProfile(files[1], "docs/clusters.md");
  CHECK(profile.host.op_issue.value == ParseSeconds("4.2 us", ""));
  CHECK(FindTransport(profile, "ib").efficiency.value == 0.88);
}

}  // namespace
}  // namespace shardwright
