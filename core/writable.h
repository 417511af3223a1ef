#pragma once

#include <span>
#include <string>

namespace shardwright {

// Throws what WriteFileAtomically (core/json.h) would throw for a folder that is missing or may not
// be written: asked before long work, so that its result is not lost. Writes nothing; a disk may
// still fill.
void CheckWritable(const std::string& file);

struct OutputFile {
  std::string path;  // of a file; standard output is none
  std::string content;
  // The user has named the folder, and the program the file: nobody meant a link or a device that
  // is found in its place, whoever owns it (it may have come out of an archive).
  bool is_in_folder = false;
};

// As WriteFileAtomically (core/json.h), all or none, in folders that are made where they are
// missing. Throws EnvironmentError, with nothing written and no folder made. Only the last step, in
// which the finished files get their names, could stop halfway, for instance when somebody makes a
// folder of such a name at that moment.
void WriteFilesAtomically(std::span<const OutputFile> files);

}  // namespace shardwright
