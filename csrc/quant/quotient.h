// Division by one number many times over, without dividing: the bits of x / scale from products.
#pragma once

#include <cmath>

#include "common/target.h"

namespace gristmill {

class Divisor {
 public:
  GRISTMILL_HOST_DEVICE explicit Divisor(float scale)
      : scale_(scale), inverse_(1.0f / scale), ordinary_(scale >= 0x1p-80f && scale <= 0x1p80f) {}

  // Whether quotient() is right for all |x| <= most. Nothing overflows then, and where |x| >= 2^-100 no residual is too
  // small for its bits. The quotient of a smaller x is below 2^-20, which every 8-bit code rounds to a zero of its
  // sign.
  GRISTMILL_HOST_DEVICE bool multiplies(float most) const { return ordinary_ && most * inverse_ < 0x1p60f; }

  // float32(x / scale). The product with the rounded inverse is within 1.5 units in the last place (Markstein 1990);
  // its residual, rounded, corrects it to within 3.5 * 2^-24 units. That rounds to the wrong side only if x / scale
  // lies as near as this to the middle of two numbers, and of all significands for which it does none is rounded
  // wrongly: tests/kernels/quotients.cpp goes through them. The residual is taken as q * scale - x, which keeps the
  // sign of a zero.
  GRISTMILL_HOST_DEVICE float quotient(float x) const {
    const float q = x * inverse_;
    return fmaf(fmaf(q, scale_, -x), -inverse_, q);
  }
  GRISTMILL_HOST_DEVICE float divided(float x) const { return x / scale_; }

 private:
  float scale_, inverse_;
  bool ordinary_;
};

}  // namespace gristmill
