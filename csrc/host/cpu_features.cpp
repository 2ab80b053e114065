// x86: cpuid says what the core has, xgetbv what the kernel saves on a context switch, and arch_prctl whether AMX tiles
// are granted. A feature counts only when all of them agree. arm64: the kernel's hwcaps (Linux) or sysctl (macOS).
#include "cpu_features.h"

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define GRISTMILL_X86 1
#include <cpuid.h>
#elif defined(__aarch64__) || defined(_M_ARM64)
#define GRISTMILL_ARM64 1
#endif

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(GRISTMILL_ARM64)
#include <sys/auxv.h>
#endif
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace gristmill::host {
namespace {

using Features = std::vector<std::pair<std::string, bool>>;

#if defined(GRISTMILL_X86)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves the zeros when the leaf does not exist
  return r;
}

bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

uint64_t saved_register_states(bool osxsave) {
  if (!osxsave) return 0;
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux hands out the 8 KiB of tile registers per process and only on request; without it the first tile instruction is
// SIGILL.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  const Registers base = cpuid(1), wide = cpuid(7, 0), wide1 = cpuid(7, 1), extended = cpuid(0x80000001u);
  const uint64_t saved = saved_register_states(bit(base.ecx, 27));
  const bool ymm = (saved & 0x6) == 0x6;               // SSE and AVX state
  const bool zmm = ymm && (saved & 0xe0) == 0xe0;      // mask registers and both halves of the zmm file
  const bool tile_state = (saved >> 17 & 0x3) == 0x3;  // XTILECFG and XTILEDATA
  const bool tiles = tile_state && bit(wide.edx, 24) && tiles_granted();
  return {
      {"sse4_2", bit(base.ecx, 20)},
      {"popcnt", bit(base.ecx, 23)},
      {"movbe", bit(base.ecx, 22)},
      {"bmi1", bit(wide.ebx, 3)},
      {"bmi2", bit(wide.ebx, 8)},
      {"lzcnt", bit(extended.ecx, 5)},
      {"avx", ymm && bit(base.ecx, 28)},
      {"f16c", ymm && bit(base.ecx, 29)},
      {"fma", ymm && bit(base.ecx, 12)},
      {"avx2", ymm && bit(wide.ebx, 5)},
      {"avx_vnni", ymm && bit(wide1.eax, 4)},
      {"avx512f", zmm && bit(wide.ebx, 16)},
      {"avx512dq", zmm && bit(wide.ebx, 17)},
      {"avx512cd", zmm && bit(wide.ebx, 28)},
      {"avx512bw", zmm && bit(wide.ebx, 30)},
      {"avx512vl", zmm && bit(wide.ebx, 31)},
      {"avx512vnni", zmm && bit(wide.ecx, 11)},
      {"avx512bf16", zmm && bit(wide1.eax, 5)},
      {"avx512fp16", zmm && bit(wide.edx, 23)},
      {"amx_tile", tiles},
      {"amx_int8", tiles && bit(wide.edx, 25)},
      {"amx_bf16", tiles && bit(wide.edx, 22)},
  };
}

#elif defined(GRISTMILL_ARM64)

#if defined(__APPLE__)
bool has(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

Features detect() {
  return {{"neon", true},
          {"fp16", has("hw.optional.arm.FEAT_FP16")},
          {"dotprod", has("hw.optional.arm.FEAT_DotProd")},
          {"i8mm", has("hw.optional.arm.FEAT_I8MM")},
          {"bf16", has("hw.optional.arm.FEAT_BF16")},
          {"sve", false}};
}
#elif defined(__linux__)
Features detect() {
  const uint64_t caps = getauxval(AT_HWCAP), caps2 = getauxval(26);  // 26 = AT_HWCAP2
  return {{"neon", (caps >> 1 & 1) != 0},   {"fp16", (caps >> 10 & 1) != 0},  {"dotprod", (caps >> 20 & 1) != 0},
          {"i8mm", (caps2 >> 13 & 1) != 0}, {"bf16", (caps2 >> 14 & 1) != 0}, {"sve", (caps >> 22 & 1) != 0}};
}
#else
Features detect() { return {{"neon", true}}; }
#endif

#else
Features detect() { return {}; }
#endif

struct Level {
  const char* name;
  std::vector<const char*> needs;  // beyond the level below it
};

// Best first, each on top of the next; packaging/cmake-modules/isa_levels.cmake has the compiler flags of each.
std::vector<Level> levels() {
#if defined(GRISTMILL_X86)
  return {{"amx", {"amx_tile", "amx_bf16", "amx_int8"}},
          {"avx512bf16", {"avx512bf16", "avx512vnni"}},
          {"avx512", {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}},
          {"avx2", {"avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe", "popcnt"}}};
#else
  return {};
#endif
}

}  // namespace

std::vector<std::pair<std::string, bool>> cpu_features() {
  static const Features features = detect();
  return features;
}

const char* architecture() {
#if defined(GRISTMILL_X86)
  return "x86_64";
#elif defined(GRISTMILL_ARM64)
  return "arm64";
#else
  return "other";
#endif
}

std::vector<std::string> isa_levels() {
  const Features features = cpu_features();
  const auto has = [&](const char* name) {
    return std::any_of(features.begin(), features.end(), [&](const auto& f) { return f.second && f.first == name; });
  };
  std::vector<std::string> usable;
  const std::vector<Level> all = levels();
  for (auto level = all.rbegin(); level != all.rend(); ++level) {
    if (!std::all_of(level->needs.begin(), level->needs.end(), has)) break;
    usable.insert(usable.begin(), level->name);
  }
  return usable;
}

}  // namespace gristmill::host
