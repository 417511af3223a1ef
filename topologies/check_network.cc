#include "topologies/check_network.h"

#include <string>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {

void CheckNetwork(const Cluster& cluster, const Profile& profile) {
  std::vector<std::string> names = {"default"};
  for (const Profile& known : {profile, LoadProfile("generic")}) {
    for (const TransportProfile& transport : known.transports) {
      names.push_back(transport.name);
    }
  }
  if (!IsIn(names, cluster.network)) {
    throw InputError((cluster.spec.empty() ? cluster.name : cluster.spec) + ": network",
                     '"' + cluster.network + '"', "a row of the profile's transports",
                     DidYouMean(cluster.network, names));
  }
}

}  // namespace shardwright
