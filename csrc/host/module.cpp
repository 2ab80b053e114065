// gristmill_kernels._host: the torch-free C++ parts as a Python module. Argument checks and conversions only.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <string>

#include "cpu_features.h"
#include "radix_tree.h"

#ifndef GRISTMILL_VERSION
#define GRISTMILL_VERSION "0+unpackaged"
#endif
#ifndef GRISTMILL_PLATFORM
#define GRISTMILL_PLATFORM "cpu"
#endif

namespace py = pybind11;
using gristmill::host::RadixTree;
using gristmill::host::Tokens;

namespace {

using IntArray = py::array_t<int32_t, py::array::c_style>;

// int32 arrays pass as they are; lists and other integer types are converted where every value fits.
IntArray int32_argument(const py::object& value, const char* name) {
  const std::string argument(name);
  py::array array = py::array::ensure(value);
  if (!array) {
    PyErr_Clear();
    throw py::type_error(argument + " must be a one-dimensional array of integers, got " +
                         py::str(py::type::of(value).attr("__name__")).cast<std::string>());
  }
  if (array.ndim() != 1) {
    throw py::value_error(argument + " must be one-dimensional, got " + std::to_string(array.ndim()) + " dimensions");
  }
  if (array.size() == 0) return IntArray(0);
  if (py::isinstance<py::array_t<int32_t>>(array)) return IntArray(array);
  const char kind = array.dtype().kind();
  if (kind != 'i' && kind != 'u') {
    throw py::type_error(argument + " must hold integers, got dtype " + py::str(array.dtype()).cast<std::string>());
  }
  for (const char* bound : {"min", "max"}) {
    const py::int_ extreme(array.attr(bound)());
    if (extreme < py::int_(std::numeric_limits<int32_t>::min()) ||
        extreme > py::int_(std::numeric_limits<int32_t>::max())) {
      throw py::value_error(argument + " must fit 32 bits, got " + py::str(extreme).cast<std::string>());
    }
  }
  return IntArray(array.attr("astype")("int32"));
}

Tokens span_of(const IntArray& array) { return {array.data(), static_cast<size_t>(array.size())}; }

// Hands the vector's memory to numpy without a copy.
py::array_t<int32_t> to_numpy(std::vector<int32_t>&& values) {
  auto owner = std::make_unique<std::vector<int32_t>>(std::move(values));
  std::vector<int32_t>* vector = owner.get();
  py::capsule keeper(owner.release(), [](void* pointer) { delete static_cast<std::vector<int32_t>*>(pointer); });
  return py::array_t<int32_t>(static_cast<py::ssize_t>(vector->size()), vector->data(), keeper);
}

py::dict build_info() {
  py::dict info;
  info["version"] = GRISTMILL_VERSION;
  info["platform"] = GRISTMILL_PLATFORM;
  info["architecture"] = gristmill::host::architecture();
#if defined(__VERSION__)
  info["compiler"] = __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
  info["cpp_standard"] = static_cast<long>(__cplusplus);
  return info;
}

void bind_radix_tree(py::module_& module) {
  py::class_<RadixTree>(module, "RadixTree", "A radix tree from token prefixes to KV-cache slots; see _host.pyi.")
      .def(py::init<int64_t>(), py::arg("page_size") = 1)
      .def(
          "match",
          [](RadixTree& tree, const py::object& ids, const std::string& extra_key) {
            const IntArray array = int32_argument(ids, "ids");
            RadixTree::Match found = tree.match(span_of(array), extra_key);
            return py::make_tuple(found.node, to_numpy(std::move(found.slots)));
          },
          py::arg("ids"), py::arg("extra_key") = "")
      .def(
          "match_length",
          [](const RadixTree& tree, const py::object& ids, const std::string& extra_key) {
            const IntArray array = int32_argument(ids, "ids");
            return tree.match_length(span_of(array), extra_key);
          },
          py::arg("ids"), py::arg("extra_key") = "")
      .def(
          "insert",
          [](RadixTree& tree, const py::object& ids, const py::object& slots, const std::string& extra_key) {
            const IntArray id_array = int32_argument(ids, "ids");
            const IntArray slot_array = int32_argument(slots, "slots");
            const RadixTree::Insertion done = tree.insert(span_of(id_array), span_of(slot_array), extra_key);
            return py::make_tuple(done.node, done.num_present);
          },
          py::arg("ids"), py::arg("slots"), py::arg("extra_key") = "")
      .def("lock", &RadixTree::lock, py::arg("node"))
      .def("unlock", &RadixTree::unlock, py::arg("node"))
      .def(
          "evict", [](RadixTree& tree, int64_t num_tokens) { return to_numpy(tree.evict(num_tokens)); },
          py::arg("num_tokens"))
      .def("clear", [](RadixTree& tree) { return to_numpy(tree.clear()); })
      .def("all_slots", [](const RadixTree& tree) { return to_numpy(tree.all_slots()); })
      .def("check", &RadixTree::check)
      .def_property_readonly("page_size", &RadixTree::page_size)
      .def_property_readonly("evictable", &RadixTree::evictable)
      .def_property_readonly("locked", &RadixTree::locked)
      .def_property_readonly("size", &RadixTree::size)
      .def_property_readonly("node_count", &RadixTree::node_count);
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.doc() = "Torch-free C++ parts of the kernels package: the radix tree and the CPU's features.";
  bind_radix_tree(module);
  module.def("cpu_features", [] {
    py::dict features;
    for (const auto& [name, usable] : gristmill::host::cpu_features()) features[py::str(name)] = usable;
    return features;
  });
  module.def("isa_levels", &gristmill::host::isa_levels);
  module.def("build_info", &build_info);
}
