#include "models/kernels/kernels.h"

#include <string>

#include "core/error.h"

namespace shardwright::internal {

std::int64_t Product(std::initializer_list<std::int64_t> factors) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 56;
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product) || product > kLimit) {
      std::string text = "the product";
      for (const std::int64_t f : factors) {
        text += (text.back() == 't' ? " " : " x ") + std::to_string(f);
      }
      throw InputError("sizes of one op", text, "at most 2^56",
                       "reduce the batch, the sequence length or the model");
    }
  }
  return product;
}

std::int64_t Rows(const LowerContext& context) {
  return Product({context.batch, context.spec.rows});
}

std::int64_t Elements(const LowerContext& context) {
  return Product({context.batch, context.spec.rows, context.spec.in});
}

Kernel PassKernel(KernelClass kind, DType dtype, std::int64_t read, std::int64_t written) {
  Kernel kernel;
  kernel.kind = kind;
  kernel.dtype = dtype;
  kernel.read = Bytes(read);
  kernel.written = Bytes(written);
  return kernel;
}

Kernel GemmKernel(const LowerContext& context, const GemmShape& shape) {
  Kernel kernel;
  kernel.kind = KernelClass::kGemm;
  kernel.dtype = context.compute;
  kernel.batch = shape.batch;
  kernel.m = shape.m;
  kernel.n = shape.n;
  kernel.k = shape.k;
  kernel.flops = Flops(2.0 * static_cast<double>(shape.batch) * static_cast<double>(shape.m) *
                       static_cast<double>(shape.n) * static_cast<double>(shape.k));
  kernel.read = Bytes(Product({shape.batch, shape.m, shape.k, context.s}) +
                      Product({shape.batch, shape.k, shape.n, context.s}));
  kernel.written = Bytes(Product({shape.batch, shape.m, shape.n, context.s}));
  return kernel;
}

void MultiplyCopies(const LowerContext& context, std::int64_t elements, Kernel* product) {
  product->dtype = DType::kFp8;
  product->scaled_by_row = context.options.fp8 == Fp8Products::kPerRow;
  product->read = product->read - Bytes(Product({elements, context.s - 1}));
}

void AppendElementwise(const LowerContext& context, std::int64_t elements, std::int64_t reads,
                       std::int64_t writes, std::vector<Kernel>* kernels) {
  kernels->push_back(PassKernel(KernelClass::kElementwise, context.compute,
                                Product({elements, reads, context.s}),
                                Product({elements, writes, context.s})));
}

void AddTensors(std::initializer_list<std::int64_t> sizes, Bytes* total,
                std::vector<Bytes>* tensors) {
  if (tensors->empty() && *total > Bytes(0)) {
    tensors->push_back(*total);
  }
  for (const std::int64_t size : sizes) {
    if (size > 0) {
      tensors->push_back(Bytes(size));
      *total += Bytes(size);
    }
  }
}

void ApplyAutocast(const LowerContext& context, std::int64_t weight_elements, OpKernels* op) {
  if (!context.options.autocast_weights || context.compute == DType::kFp32) {
    return;
  }
  const std::int64_t master = Product({weight_elements, kFp32Bytes});
  const std::int64_t cast = Product({weight_elements, context.s});
  op->forward.insert(op->forward.begin(),
                     PassKernel(KernelClass::kCopy, context.compute, master, cast));
  op->backward_weight.push_back(PassKernel(KernelClass::kCopy, DType::kFp32, cast, master));
  AddTensors({cast}, &op->extra_saved, &op->extra_saved_tensors);
}

}  // namespace shardwright::internal
