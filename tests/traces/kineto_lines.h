#pragma once

// Traces as PyTorch's profiler writes them, made by hand.

#include <sstream>
#include <string>
#include <vector>

namespace shardwright::testing {

// Events of a trace, in any order.
class KinetoLines {
 public:
  // `args`: members of the args object.
  KinetoLines& Slice(const std::string& category, const std::string& name, double begin,
                     double duration, const std::string& args = "", int thread = 1) {
    std::ostringstream text;
    text << std::fixed;
    text.precision(3);
    text << R"({"ph":"X","cat":")" << category << R"(","name":")" << name << R"(","pid":0,"tid":)"
         << thread << R"(,"ts":)" << begin << R"(,"dur":)" << duration << R"(,"args":{)" << args
         << "}}";
    lines_.push_back(text.str());
    return *this;
  }
  KinetoLines& Range(const std::string& name, double begin, double end, int thread = 1) {
    return Slice("user_annotation", name, begin, end - begin, "", thread);
  }
  // A kernel of 10 us on a stream, launched by a call of 1 us.
  KinetoLines& Kernel(const std::string& name, double launch, double begin, int stream,
                      const std::string& args = "", double duration = 10) {
    const std::string number = std::to_string(++correlation_);
    Slice("cuda_runtime", "cudaLaunchKernel", launch, 1, "\"correlation\":" + number);
    return Slice("kernel", name, begin, duration,
                 "\"device\":0,\"stream\":" + std::to_string(stream) +
                     ",\"correlation\":" + number + (args.empty() ? "" : "," + args),
                 stream);
  }
  KinetoLines& Line(const std::string& line) {
    lines_.push_back(line);
    return *this;
  }
  [[nodiscard]] std::string Text(bool header_first = true) const {
    const std::string header =
        R"("schemaVersion":1,"distributedInfo":{"backend":"nccl","rank":3,"world_size":8})";
    const std::string list = "\"traceEvents\":" + List();
    return "{" + (header_first ? header + "," + list : list + "," + header) + "}";
  }
  [[nodiscard]] std::string List() const {
    std::string text = "[";
    for (const std::string& line : lines_) {
      text += (text.size() > 1 ? "," : "") + line;
    }
    return text + "]";
  }

 private:
  std::vector<std::string> lines_;
  int correlation_ = 0;
};

}  // namespace shardwright::testing
