// A second kind of device on the host's memory, as a maker of accelerators would bring it to torch: allocator, streams,
// events, pinned memory, and every operation by the CPU's kernels on copies. It computes at once, so its streams are in order;
// but what is copied to pinned memory without a wait is not there, and all its bits are set, until somebody waits for it.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
constexpr size_t TOTAL = size_t(1) << 30;  // bytes of each device

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[COUNT] = {};

// ---- memory

struct Memory final : c10::DeviceAllocator {
  c10::CachingDeviceAllocator::DeviceStats stats[COUNT];
  std::unordered_map<void*, std::pair<DeviceIndex, size_t>> blocks;
  std::mutex mutex;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override { return stats[device]; }
  void resetAccumulatedStats(DeviceIndex device) override { of(device).reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override { of(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {TOTAL - of(device).current, TOTAL};
  }
  c10::CachingAllocator::Stat& of(DeviceIndex device) {
    return stats[device].allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  }
  void free(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(data);
    if (found == blocks.end()) return;
    of(found->second.first).decrease(found->second.second);
    blocks.erase(found);
    std::free(data);
  }
};

Memory memory;

void free_block(void* data) { memory.free(data); }

c10::DataPtr Memory::allocate(size_t bytes) {
  DeviceIndex device = current_device;
  if (bytes == 0) return {nullptr, nullptr, &free_block, Device(KIND, device)};
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK_WITH(OutOfMemoryError, of(device).current + bytes <= TOTAL, "acme out of memory");
  void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  blocks[data] = {device, bytes};
  of(device).increase(bytes);
  return {data, data, &free_block, Device(KIND, device)};
}

c10::DeleterFnPtr Memory::raw_deleter() const { return &free_block; }

REGISTER_ALLOCATOR(KIND, &memory)

struct Pinned final : c10::Allocator {
  std::unordered_set<const void*> all;
  mutable std::mutex mutex;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool has(const void* data) const {
    std::lock_guard<std::mutex> lock(mutex);
    return all.count(data) > 0;
  }
};

Pinned pinned;

void unpin(void* data) {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.all.erase(data);
  std::free(data);
}

c10::DataPtr Pinned::allocate(size_t bytes) {
  void* data = std::aligned_alloc(64, bytes / 64 * 64 + 64);
  std::lock_guard<std::mutex> lock(mutex);
  all.insert(data);
  return {data, data, &unpin, Device(c10::kCPU)};
}

c10::DeleterFnPtr Pinned::raw_deleter() const { return &unpin; }

// ---- copies that nobody has waited for yet

struct Copy {
  Stream stream;
  uint64_t number;
  at::Tensor to, value;
};

struct Copies {
  std::vector<Copy> pending;
  uint64_t count = 0;
  std::recursive_mutex mutex;

  void add(const at::Tensor& from, const at::Tensor& to, Stream stream) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    std::memset(to.data_ptr(), 0xff, to.nbytes());
    pending.push_back({stream, ++count, to, from.contiguous().clone()});
  }
  void finish(const Stream& stream, uint64_t up_to) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    std::vector<Copy> later;
    for (auto& copy : pending) {
      if (copy.stream == stream && copy.number <= up_to) std::memcpy(copy.to.data_ptr(), copy.value.data_ptr(), copy.to.nbytes());
      else later.push_back(copy);
    }
    pending.swap(later);
  }
};

Copies& copies() {
  static auto* all = new Copies;  // never destroyed: tensors outlive torch's allocators badly
  return *all;
}

struct Mark {
  Stream stream;
  uint64_t number;
  void finish() const { copies().finish(stream, number); }
};

// ---- devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(KIND, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < COUNT, "acme has no device ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }

  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, of(device), current_stream[of(device).index()]); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, of(device), 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> streams{0};
    return Stream(Stream::UNSAFE, of(device), ++streams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { copies().finish(stream, UINT64_MAX); }
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream& stream, DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Mark*>(*event);
    *event = new Mark{stream, copies().count};
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override { return synchronizeEvent(event), true; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Mark*>(event)->finish();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }

 private:
  static Device of(Device device) { return device.has_index() ? device : Device(KIND, current_device); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(KIND, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(KIND, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};

// ---- operations

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  Device before = Guard().getDevice();
  Guard().setDevice(device.value_or(before));
  auto made = at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
  Guard().setDevice(before);
  return made;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  Device before = Guard().getDevice();
  Guard().setDevice(device.value_or(before));
  auto made = at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
  Guard().setDevice(before);
  return made;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (non_blocking && to.is_cpu() && to.is_contiguous() && pinned.has(to.data_ptr()) && to.dtype() == from.dtype())
    copies().add(on_host(from), to, Guard().getStream(from.device()));
  else
    on_host(to).copy_(on_host(from));
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef, std::optional<c10::MemoryFormat>);

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = self.dtype().itemsize() * c10::multiply_integers(size) + self.storage_offset() * self.dtype().itemsize();
  if (impl->unsafe_storage().nbytes() < bytes) {
    auto data = memory.allocate(bytes);
    if (impl->unsafe_storage().nbytes()) std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    impl->unsafe_storage().set_data_ptr_noswap(std::move(data));
    impl->unsafe_storage().unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return on_host(self).item(); }

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

void record_stream(at::Tensor&, Stream) {}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
