// The 8-bit floats of KV caches as plain structs that say what their codes mean.
#pragma once

#include <cstdint>

namespace gristmill {

// What the codes of the highest exponent mean.
enum class Float8Top {
  kOneNan,       // 0x7f and 0xff are NaN, all others numbers; no infinity (e4m3fn)
  kInfinity,     // as in IEEE formats (e5m2)
  kNegativeZero  // 0x80 is the only NaN, all others are numbers; no infinity and no negative zero (e4m3fnuz)
};

struct Float8E4M3 {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kLargest = 448;
  static constexpr Float8Top kTop = Float8Top::kOneNan;
  uint8_t bits;
};

struct Float8E5M2 {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kLargest = 57344;
  static constexpr Float8Top kTop = Float8Top::kInfinity;
  uint8_t bits;
};

struct Float8E4M3Fnuz {
  static constexpr int kMantissa = 3, kBias = 8;
  static constexpr float kLargest = 240;
  static constexpr Float8Top kTop = Float8Top::kNegativeZero;
  uint8_t bits;
};

template <typename T>
concept Float8 = requires { T::kTop; };

}  // namespace gristmill
