#include "traces/gzip.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <zlib.h>

#include "core/error.h"
#include "core/files.h"
#include "core/threads.h"

namespace shardwright {
namespace {

constexpr std::size_t kPieceSize = std::size_t{1} << 18;
// The fastest level: half the size of level 6 is not worth three times its time here.
constexpr int kLevel = Z_BEST_SPEED;
constexpr int kGzipWindow = 15 + 16;  // 32 KiB window, gzip header (zlib.h, deflateInit2)
constexpr int kMemoryLevel = 8;       // zlib's default
// Gzip packs a thousand times; a trace of 1 GiB takes 2 to 3 seconds.
constexpr std::int64_t kMostText = std::int64_t{3} << 30;

}  // namespace

struct TextSink::Deflater {
  z_stream stream{};

  Deflater() {
    const int code =
        deflateInit2(&stream, kLevel, Z_DEFLATED, kGzipWindow, kMemoryLevel, Z_DEFAULT_STRATEGY);
    SW_CHECK(code == Z_OK, "deflateInit2 returned " + std::to_string(code));
  }
  ~Deflater() { deflateEnd(&stream); }
  Deflater(const Deflater&) = delete;
  Deflater& operator=(const Deflater&) = delete;
};

TextSink::TextSink(bool compressed)
    : deflater_(compressed ? std::make_unique<Deflater>() : nullptr) {}
TextSink::~TextSink() = default;
TextSink::TextSink(TextSink&&) noexcept = default;
TextSink& TextSink::operator=(TextSink&&) noexcept = default;

void TextSink::Append(std::string_view text) {
  ThrowIfStopped();
  if (deflater_ == nullptr) {
    done_ += text;
    return;
  }
  pending_ += text;
  if (pending_.size() >= kPieceSize) {
    Compress(false);
  }
}

void TextSink::Compress(bool is_last) {
  z_stream& stream = deflater_->stream;
  std::array<unsigned char, 1U << 16> out;
  // zlib takes unsigned chars that it does not write to, and lengths of 32 bits.
  auto* next = reinterpret_cast<unsigned char*>(pending_.data());
  std::size_t left = pending_.size();
  do {
    const std::size_t piece = std::min(left, kPieceSize);
    stream.next_in = next;
    stream.avail_in = static_cast<unsigned>(piece);
    next += piece;
    left -= piece;
    do {
      stream.next_out = out.data();
      stream.avail_out = static_cast<unsigned>(out.size());
      const int code = deflate(&stream, is_last && left == 0 ? Z_FINISH : Z_NO_FLUSH);
      SW_CHECK(code != Z_STREAM_ERROR, "deflate lost its state");
      done_.append(reinterpret_cast<const char*>(out.data()), out.size() - stream.avail_out);
    } while (stream.avail_out == 0);
  } while (left > 0);
  pending_.clear();
}

std::string TextSink::Finish() {
  if (deflater_ != nullptr) {
    Compress(true);
  }
  return std::move(done_);
}

struct TextSource::Stream {
  InputFile file;
  z_stream inflater{};
  bool is_gzip = false;
  bool inside_member = false;  // gzip data has begun and not ended
  std::array<unsigned char, 1U << 16> input;

  explicit Stream(const std::string& name) : file(name, "a trace file") {}
  ~Stream() {
    if (is_gzip) {
      inflateEnd(&inflater);
    }
  }
  void Refill() {
    inflater.next_in = input.data();
    inflater.avail_in = static_cast<unsigned>(file.Read(input.data(), input.size()));
  }
};

TextSource::TextSource(const std::string& file)
    : file_(file),
      stream_(std::make_unique<Stream>(file)),
      text_(file, "bytes of unpacked text", kMostText) {
  z_stream& inflater = stream_->inflater;
  stream_->Refill();
  // The two magic bytes of RFC 1952, section 2.3.1.
  if (inflater.avail_in >= 2 && stream_->input[0] == 0x1f && stream_->input[1] == 0x8b) {
    const int code = inflateInit2(&inflater, kGzipWindow);
    SW_CHECK(code == Z_OK, "inflateInit2 returned " + std::to_string(code));
    stream_->is_gzip = true;
    stream_->inside_member = true;
  }
}
TextSource::~TextSource() = default;
TextSource::TextSource(TextSource&&) noexcept = default;
TextSource& TextSource::operator=(TextSource&&) noexcept = default;

std::size_t TextSource::Read(char* buffer, std::size_t size) {
  const std::size_t count = ReadSome(buffer, size);
  ThrowIfStopped();
  text_.Take(static_cast<std::int64_t>(count));
  return count;
}

std::size_t TextSource::ReadSome(char* buffer, std::size_t size) {
  z_stream& inflater = stream_->inflater;
  if (!stream_->is_gzip && inflater.avail_in == 0) {
    return stream_->file.Read(buffer, size);
  }
  if (!stream_->is_gzip) {
    const std::size_t count = std::min<std::size_t>(size, inflater.avail_in);
    std::memcpy(buffer, inflater.next_in, count);
    inflater.next_in += count;
    inflater.avail_in -= static_cast<unsigned>(count);
    return count;
  }
  const auto wanted = static_cast<unsigned>(std::min(size, kPieceSize));
  inflater.next_out = reinterpret_cast<unsigned char*>(buffer);
  inflater.avail_out = wanted;
  while (inflater.avail_out == wanted) {
    if (inflater.avail_in == 0) {
      stream_->Refill();
    }
    if (inflater.avail_in == 0) {
      if (stream_->inside_member) {
        throw InputError(file_, "compressed data that ends too early", "a whole gzip file");
      }
      break;
    }
    stream_->inside_member = true;
    const int code = inflate(&inflater, Z_NO_FLUSH);
    if (code == Z_STREAM_END) {
      // Another member may follow (gzip files may be joined).
      stream_->inside_member = false;
      inflateReset(&inflater);
    } else if (code != Z_OK && code != Z_BUF_ERROR) {
      throw InputError(file_, "damaged compressed data", "a whole gzip file");
    }
  }
  return wanted - inflater.avail_out;
}

}  // namespace shardwright
