#include "executor/host/kernels/table.h"
#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {

const Subject& SubjectUnderTest() {
  static const Subject subject = {"shardwright-host",
                                  [](const ModelOpCall& call, bool is_backward) {
                                    if (is_backward) {
                                      BackwardOnHost(call);
                                    } else {
                                      ForwardOnHost(call);
                                    }
                                  },
                                  0.0};
  return subject;
}

}  // namespace shardwright::testing
