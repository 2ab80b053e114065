// What the CPU and the operating system together allow a process to execute, asked of the hardware at run time.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace gristmill::host {

// (name, usable) pairs in a fixed order; a name of another architecture is not listed.
std::vector<std::pair<std::string, bool>> cpu_features();

// "x86_64", "arm64" or "other".
const char* architecture();

// Levels of the op libraries that may be opened here, best first; empty where only the generic build can run.
std::vector<std::string> isa_levels();

}  // namespace gristmill::host
