// What the page in a browser does without: libraries that are not there as WebAssembly (zlib,
// SQLite, pugixml), threads, and a terminal.

#include <utility>

#include <emscripten.h>
#include <sys/types.h>
#include <unistd.h>

#include "cli/search_progress.h"
#include "core/error.h"
#include "core/files.h"
#include "topologies/internal/machine.h"
#include "traces/gzip.h"
#include "traces/nsight.h"

// Emscripten exports its text, so it is in no namespace.
// clang-format off
EM_JS(void, TellProgress, (double simulated, double best, double bound), {
  if (Module["onProgress"]) {
    Module["onProgress"](simulated, best, bound);
  }
});
// clang-format on

// Linux's call by the name that Emscripten's library has for the browser's.
extern "C" ssize_t getrandom(void* bytes, std::size_t size, unsigned /*flags*/) {
  return getentropy(bytes, size) == 0 ? static_cast<ssize_t>(size) : -1;
}

namespace shardwright {

struct TextSink::Deflater {};

TextSink::TextSink(bool compressed) {
  if (compressed) {
    throw EnvironmentError("this build writes no gzip");
  }
}
TextSink::~TextSink() = default;
TextSink::TextSink(TextSink&&) noexcept = default;
TextSink& TextSink::operator=(TextSink&&) noexcept = default;

void TextSink::Append(std::string_view text) {
  done_ += text;
}

std::string TextSink::Finish() {
  return std::move(done_);
}

struct TextSource::Stream {
  explicit Stream(const std::string& name) : file(name) {}
  InputFile file;
};

TextSource::TextSource(const std::string& file)
    : file_(file),
      stream_(std::make_unique<Stream>(file)),
      text_(file, "bytes of text", std::int64_t{3} << 30) {
  char first = '\0';
  if (InputFile(file).Read(&first, 1) == 1 && first == 0x1f) {
    throw InputError(file, "a compressed file", "one that the page unpacked");
  }
}
TextSource::~TextSource() = default;
TextSource::TextSource(TextSource&&) noexcept = default;
TextSource& TextSource::operator=(TextSource&&) noexcept = default;

std::size_t TextSource::Read(char* buffer, std::size_t size) {
  const std::size_t count = stream_->file.Read(buffer, size);
  text_.Take(static_cast<std::int64_t>(count));
  return count;
}

ProfilerRecording ReadNsight(const std::string& file) {
  throw InputError(file, "an export of Nsight Systems",
                   "a file that the page reads; the program shardwright reads this one");
}

// Not lines for a terminal, but calls to the page.
std::function<void(const SearchProgress&)> ProgressLines(bool /*ticks*/,
                                                         const std::string& /*name*/) {
  return [](const SearchProgress& progress) {
    TellProgress(static_cast<double>(progress.simulated), progress.best.value,
                 progress.lower_bound.value);
  };
}

namespace internal {

Machine ReadNcclXml(std::string_view /*text*/, const std::string& file) {
  throw InputError(file, "a topology in XML", "what the page reads; the program reads this one");
}

Machine ReadHwlocXml(std::string_view text, const std::string& file) {
  return ReadNcclXml(text, file);
}

}  // namespace internal
}  // namespace shardwright
