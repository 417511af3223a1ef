#include "tests/executor/cuda/fake_cudnn.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include <doctest/doctest.h>

#include "executor/cuda/cudnn_graph.h"
#include "executor/half.h"

namespace shardwright::testing {
namespace {

using N = CudnnNumbers;

struct Desc {
  int kind = 0;
  bool is_final = false;
  std::map<int, std::vector<std::byte>> values = {};
  // What a virtual tensor holds, by its place in memory.
  std::vector<float> inside = {};
};

template <class T>
std::vector<T> All(const Desc& desc, int attribute) {
  const auto at = desc.values.find(attribute);
  REQUIRE(at != desc.values.end());
  std::vector<T> values(at->second.size() / sizeof(T));
  std::memcpy(values.data(), at->second.data(), at->second.size());
  return values;
}
template <class T>
T One(const Desc& desc, int attribute) {
  const auto at = desc.values.find(attribute);
  REQUIRE(at != desc.values.end());
  REQUIRE(at->second.size() >= sizeof(T));
  T value{};
  std::memcpy(&value, at->second.data(), sizeof value);
  return value;
}
Desc* Of(const Desc& desc, int attribute) {
  return desc.values.contains(attribute) ? One<Desc*>(desc, attribute) : nullptr;
}

std::size_t SizeOfType(int type) {
  switch (type) {
    case N::kTypeBool:
    case N::kTypeChar:
      return 1;
    case N::kTypeInt64:
    case N::kTypeHandle:
    case N::kTypePointer:
    case N::kTypeDescriptor:
      return 8;
    default:
      return 4;
  }
}

using Index = CudnnShape;
using Pointers = std::map<std::int64_t, void*>;

// A tensor of a running graph.
class Values {
 public:
  Values(Desc* tensor, const Pointers& pointers) : tensor_(tensor) {
    const auto dims = All<std::int64_t>(*tensor, N::kTensorDims);
    const auto strides = All<std::int64_t>(*tensor, N::kTensorStrides);
    REQUIRE(dims.size() == 4);
    std::int64_t size = 1;
    for (std::size_t i = 0; i < 4; ++i) {
      dims_[i] = dims[i];
      strides_[i] = strides[i];
      size += (dims[i] - 1) * strides[i];
    }
    type_ = One<int>(*tensor, N::kTensorType);
    if (One<bool>(*tensor, N::kTensorIsVirtual)) {
      tensor->inside.resize(static_cast<std::size_t>(size));
    } else {
      data_ = pointers.at(One<std::int64_t>(*tensor, N::kTensorUid));
      REQUIRE(data_ != nullptr);
    }
  }

  [[nodiscard]] const Index& dims() const { return dims_; }
  // Dimensions of one are repeated, fewer heads are shared by neighbours.
  [[nodiscard]] float Get(const Index& at) const { return Load(Place(at)); }
  void Set(const Index& at, float value) { Store(Place(at), value); }
  [[nodiscard]] std::size_t Place(const Index& at) const {
    std::int64_t place = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      place += (dims_[i] == 1 ? 0 : at[i]) * strides_[i];
    }
    return static_cast<std::size_t>(place);
  }
  [[nodiscard]] float Load(std::size_t place) const {
    if (data_ == nullptr) {
      return tensor_->inside.at(place);
    }
    switch (type_) {
      case N::kBf16:
        return Bf16ToFloat(static_cast<const std::uint16_t*>(data_)[place]);
      case N::kFp16:
        return Fp16ToFloat(static_cast<const std::uint16_t*>(data_)[place]);
      default:
        return static_cast<const float*>(data_)[place];
    }
  }
  void Store(std::size_t place, float value) {
    const bool is_bf16 = type_ == N::kBf16;
    if (is_bf16 || type_ == N::kFp16) {
      const std::uint16_t bits = is_bf16 ? FloatToBf16(value) : FloatToFp16(value);
      if (data_ != nullptr) {
        static_cast<std::uint16_t*>(data_)[place] = bits;
        return;
      }
      value = is_bf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
    }
    (data_ == nullptr ? tensor_->inside.data() : static_cast<float*>(data_))[place] = value;
  }
  template <class F>
  void Each(const F& f) const {
    for (Index i = {}; i[0] < dims_[0]; ++i[0]) {
      for (i[1] = 0; i[1] < dims_[1]; ++i[1]) {
        for (i[2] = 0; i[2] < dims_[2]; ++i[2]) {
          for (i[3] = 0; i[3] < dims_[3]; ++i[3]) {
            f(i);
          }
        }
      }
    }
  }

 private:
  Desc* tensor_;
  void* data_ = nullptr;
  int type_ = 0;
  Index dims_ = {}, strides_ = {};
};

float Apply(int mode, float x, float b, bool select) {
  switch (mode) {
    case N::kAdd:
      return x + b;
    case N::kMultiply:
      return x * b;
    case N::kDivide:
      return x / b;
    case N::kSubtract:
      return x - b;
    case N::kExp:
      return std::exp(x);
    case N::kLog:
      return std::log(x);
    case N::kGreaterEqual:
      return x >= b ? 1.0F : 0.0F;
    case N::kSelect:
      return select ? x : b;
    default:
      FAIL("pointwise mode " << mode);
      return 0.0F;
  }
}

void RunPointwise(const Desc& op, const Pointers& pointers) {
  const Desc& how = *Of(op, N::kPointwiseOpDesc);
  const int mode = One<int>(how, N::kPointwiseMode);
  const Values x(Of(op, N::kPointwiseOpX), pointers);
  Values y(Of(op, N::kPointwiseOpY), pointers);
  const auto optional = [&](int attribute) {
    Desc* const tensor = Of(op, attribute);
    return tensor == nullptr ? std::nullopt : std::optional<Values>(Values(tensor, pointers));
  };
  const std::optional<Values> b = optional(N::kPointwiseOpB), t = optional(N::kPointwiseOpT);
  y.Each([&](const Index& i) {
    if (mode == N::kIndex) {
      const auto axis = static_cast<std::size_t>(One<std::int64_t>(how, N::kPointwiseAxis));
      y.Set(i, static_cast<float>(i.at(axis)));
    } else {
      y.Set(i, Apply(mode, x.Get(i), b ? b->Get(i) : 0.0F, t && t->Get(i) != 0.0F));
    }
  });
}

void RunProduct(const Desc& op, const Pointers& pointers) {
  const Values a(Of(op, N::kMatmulA), pointers), b(Of(op, N::kMatmulB), pointers);
  Values c(Of(op, N::kMatmulC), pointers);
  CHECK(a.dims()[3] == b.dims()[2]);
  CHECK(a.dims()[2] == c.dims()[2]);
  CHECK(b.dims()[3] == c.dims()[3]);
  const std::int64_t shared_a = c.dims()[1] / a.dims()[1], shared_b = c.dims()[1] / b.dims()[1];
  c.Each([&](const Index& i) {
    float sum = 0.0F;
    for (std::int64_t k = 0; k < a.dims()[3]; ++k) {
      sum += a.Get({i[0], i[1] / shared_a, i[2], k}) * b.Get({i[0], i[1] / shared_b, k, i[3]});
    }
    c.Set(i, sum);
  });
}

// Every dimension of y is that of x, or a divisor of it that neighbours are reduced to.
void RunReduction(const Desc& op, const Pointers& pointers) {
  const bool is_sum = One<int>(*Of(op, N::kReductionDesc), N::kReductionOperator) == N::kSum;
  const Values x(Of(op, N::kReductionX), pointers);
  Values y(Of(op, N::kReductionY), pointers);
  std::map<std::size_t, float> results;
  x.Each([&](const Index& i) {
    Index to = {};
    for (std::size_t d = 0; d < 4; ++d) {
      to[d] = i[d] / (x.dims()[d] / y.dims()[d]);
    }
    const auto [at, is_new] = results.try_emplace(y.Place(to), x.Get(i));
    if (!is_new) {
      at->second = is_sum ? at->second + x.Get(i) : std::max(at->second, x.Get(i));
    }
  });
  for (const auto& [place, value] : results) {
    y.Store(place, value);
  }
}

// The same memory with other dimensions.
void RunReshape(const Desc& op, const Pointers& pointers) {
  const Values x(Of(op, N::kReshapeX), pointers);
  Values y(Of(op, N::kReshapeY), pointers);
  y.Each([&](const Index& i) { y.Store(y.Place(i), x.Load(y.Place(i))); });
}

void RunConvolution(const Desc& op, const Pointers& pointers) {
  const int first = op.kind == N::kConvForward    ? N::kConvForwardFirst
                    : op.kind == N::kConvDataGrad ? N::kConvDataGradFirst
                                                  : N::kConvWeightGradFirst;
  const Desc& how = *Of(op, first + 2);
  CHECK(One<int>(how, N::kConvMode) == N::kCrossCorrelation);
  const auto stride = One<std::int64_t>(how, N::kConvStrides);
  const auto padding = One<std::int64_t>(how, N::kConvPaddingBefore);
  CHECK(One<float>(op, first) == 1.0F);
  const auto beta = One<float>(op, first + 1);
  for (const int tensor : {first + 4, first + 5}) {  // the library has no engine for others
    CHECK(One<int>(*Of(op, tensor), N::kTensorType) ==
          One<int>(*Of(op, first + 3), N::kTensorType));
  }
  Values w(Of(op, first + 3), pointers), x(Of(op, first + 4), pointers),
      y(Of(op, first + 5), pointers);
  Values& to = op.kind == N::kConvForward ? y : op.kind == N::kConvDataGrad ? x : w;
  std::map<std::size_t, float> sums;
  to.Each([&](const Index& i) { sums[to.Place(i)] = beta == 0.0F ? 0.0F : beta * to.Get(i); });
  const std::int64_t groups = x.dims()[1] / w.dims()[1];
  y.Each([&](const Index& i) {
    const std::int64_t group = i[1] / (y.dims()[1] / groups);
    w.Each([&](const Index& t) {
      const Index from = {i[0], group * w.dims()[1] + t[1], i[2] * stride + t[2] - padding,
                          i[3] * stride + t[3] - padding};
      if (t[0] != i[1] || from[2] < 0 || from[2] >= x.dims()[2] || from[3] < 0 ||
          from[3] >= x.dims()[3]) {
        return;
      }
      if (&to == &y) {
        sums[y.Place(i)] += x.Get(from) * w.Get(t);
      } else if (&to == &x) {
        sums[x.Place(from)] += y.Get(i) * w.Get(t);
      } else {
        sums[w.Place(t)] += y.Get(i) * x.Get(from);
      }
    });
  });
  for (const auto& [place, value] : sums) {
    to.Store(place, value);
  }
}

void RunOperation(const Desc& op, const Pointers& pointers) {
  switch (op.kind) {
    case N::kPointwiseOp:
      return RunPointwise(op, pointers);
    case N::kMatmulOp:
      return RunProduct(op, pointers);
    case N::kReductionOp:
      return RunReduction(op, pointers);
    case N::kReshapeOp:
      return RunReshape(op, pointers);
    default:
      return RunConvolution(op, pointers);
  }
}

int CreateHandle(void** handle) {
  ++FakeCudnn().handles;
  *handle = new int();
  return 0;
}
int DestroyHandle(void* handle) {
  --FakeCudnn().handles;
  FakeCudnn().left_behind = FakeCudnn().descriptors;
  delete static_cast<int*>(handle);
  return 0;
}
int SetStream(void* /*handle*/, void* /*stream*/) {
  return 0;
}
const char* ErrorString(int /*status*/) {
  return "FAKE_ERROR";
}
void LastError(char* text, std::size_t size) {
  std::strncpy(text, "no reason", size - 1);
}
std::size_t Version() {
  return 91900;
}
int Create(int kind, void** desc) {
  ++FakeCudnn().descriptors;
  *desc = new Desc{.kind = kind};
  return 0;
}
int Destroy(void* desc) {
  --FakeCudnn().descriptors;
  delete static_cast<Desc*>(desc);
  return 0;
}
int Set(void* desc, int attribute, int type, std::int64_t count, const void* values) {
  Desc& d = *static_cast<Desc*>(desc);
  CHECK_FALSE(d.is_final);
  const auto* const bytes = static_cast<const std::byte*>(values);
  d.values[attribute].assign(bytes, bytes + static_cast<std::size_t>(count) * SizeOfType(type));
  return 0;
}
int Get(void* desc, int attribute, int type, std::int64_t room, std::int64_t* count, void* values) {
  Desc& d = *static_cast<Desc*>(desc);
  FakeCudnnState& fake = FakeCudnn();
  if (attribute == N::kHeuristicsResults) {
    fake.heuristics_asked += room == 0 ? 1 : 0;
    *count = fake.refuses ? 0 : 1;
    if (room > 0) {
      Desc& config = **static_cast<Desc**>(values);
      config.values[N::kHeuristicsGraph] = d.values.at(N::kHeuristicsGraph);
    }
  } else if (attribute == N::kEngineNotes) {
    *count = static_cast<std::int64_t>(fake.notes.size());
    std::memcpy(values, fake.notes.data(), static_cast<std::size_t>(room) * SizeOfType(type));
  } else if (attribute == N::kPlanWorkspace) {
    *count = 1;
    std::memcpy(values, &fake.workspace_size, sizeof fake.workspace_size);
  } else {
    CHECK(attribute == N::kConfigEngine);
  }
  return 0;
}
int Finalize(void* desc) {
  static_cast<Desc*>(desc)->is_final = true;
  return 0;
}
// Unlike cuDNN's, its plans refer to the graph; so the graph stays.
int Execute(void* /*handle*/, void* plan, void* pack) {
  ++FakeCudnn().executed;
  if (FakeCudnn().execute_status != 0) {
    return FakeCudnn().execute_status;
  }
  const Desc& arguments = *static_cast<Desc*>(pack);
  const auto uids = All<std::int64_t>(arguments, N::kPackUids);
  const auto addresses = All<void*>(arguments, N::kPackPointers);
  Pointers pointers;
  for (std::size_t i = 0; i < uids.size(); ++i) {
    pointers[uids[i]] = addresses.at(i);
  }
  const Desc& config = *Of(*static_cast<Desc*>(plan), N::kPlanConfig);
  for (Desc* const op : All<Desc*>(*Of(config, N::kHeuristicsGraph), N::kGraphOps)) {
    RunOperation(*op, pointers);
  }
  return 0;
}

}  // namespace

FakeCudnnState& FakeCudnn() {
  static FakeCudnnState state;
  return state;
}

CudnnTable FakeCudnnTable() {
  return {.get_version = Version,
          .create = CreateHandle,
          .destroy = DestroyHandle,
          .set_stream = SetStream,
          .error_string = ErrorString,
          .last_error = LastError,
          .desc_create = Create,
          .desc_destroy = Destroy,
          .desc_set = Set,
          .desc_get = Get,
          .desc_finalize = Finalize,
          .execute = Execute};
}

}  // namespace shardwright::testing
