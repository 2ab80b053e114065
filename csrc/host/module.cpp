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
template <typename T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  std::vector<T>* vector = owner.get();
  py::capsule keeper(owner.release(), [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return py::array_t<T>(static_cast<py::ssize_t>(vector->size()), vector->data(), keeper);
}

// ("stored", hash of the page before or None, hashes, tokens, extra_key) or ("removed", hashes)
py::list events_to_python(std::vector<RadixTree::Event>&& events) {
  py::list list;
  for (RadixTree::Event& event : events) {
    if (event.stored) {
      list.append(
          py::make_tuple("stored", event.parent, event.pages, to_numpy(std::move(event.tokens)), event.extra_key));
    } else {
      list.append(py::make_tuple("removed", event.pages));
    }
  }
  return list;
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
      .def(py::init([](int64_t page_size, const std::string& eviction, int64_t window, bool events) {
             return std::make_unique<RadixTree>(page_size, gristmill::host::eviction_named(eviction), window, events);
           }),
           py::arg("page_size") = 1, py::arg("eviction") = "lru", py::arg("window") = 0, py::arg("events") = false)
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
          "match_path",
          [](const RadixTree& tree, const py::object& ids, const std::string& extra_key) {
            const IntArray array = int32_argument(ids, "ids");
            RadixTree::Path path = tree.match_path(span_of(array), extra_key);
            return py::make_tuple(path.length, to_numpy(std::move(path.nodes)));
          },
          py::arg("ids"), py::arg("extra_key") = "")
      .def(
          "insert",
          [](RadixTree& tree, const py::object& ids, const py::object& slots, const std::string& extra_key,
             int64_t priority) {
            const IntArray id_array = int32_argument(ids, "ids");
            const IntArray slot_array = int32_argument(slots, "slots");
            const RadixTree::Insertion done = tree.insert(span_of(id_array), span_of(slot_array), extra_key, priority);
            return py::make_tuple(done.node, done.num_present);
          },
          py::arg("ids"), py::arg("slots"), py::arg("extra_key") = "", py::arg("priority") = 0)
      .def("lock", &RadixTree::lock, py::arg("node"))
      .def("unlock", &RadixTree::unlock, py::arg("node"))
      .def(
          "evict", [](RadixTree& tree, int64_t num_tokens) { return to_numpy(tree.evict(num_tokens)); },
          py::arg("num_tokens"))
      .def("take_events", [](RadixTree& tree) { return events_to_python(tree.take_events()); })
      .def(
          "match_window",
          [](RadixTree& tree, const py::object& ids, const std::string& extra_key) {
            const IntArray array = int32_argument(ids, "ids");
            RadixTree::WindowMatch found = tree.match_window(span_of(array), extra_key);
            return py::make_tuple(found.node, to_numpy(std::move(found.slots)), found.window_start,
                                  to_numpy(std::move(found.window_slots)));
          },
          py::arg("ids"), py::arg("extra_key") = "")
      .def(
          "match_window_length",
          [](const RadixTree& tree, const py::object& ids, const std::string& extra_key) {
            const IntArray array = int32_argument(ids, "ids");
            return tree.match_window_length(span_of(array), extra_key);
          },
          py::arg("ids"), py::arg("extra_key") = "")
      .def(
          "insert_window",
          [](RadixTree& tree, const py::object& ids, const py::object& slots, int64_t window_start,
             const py::object& window_slots, const std::string& extra_key, int64_t priority) {
            const IntArray id_array = int32_argument(ids, "ids");
            const IntArray slot_array = int32_argument(slots, "slots");
            const IntArray window_array = int32_argument(window_slots, "window_slots");
            RadixTree::WindowInsertion done = tree.insert_window(span_of(id_array), span_of(slot_array), window_start,
                                                                 span_of(window_array), extra_key, priority);
            return py::make_tuple(done.node, done.num_present, to_numpy(std::move(done.taken)));
          },
          py::arg("ids"), py::arg("slots"), py::arg("window_start"), py::arg("window_slots"), py::arg("extra_key") = "",
          py::arg("priority") = 0)
      .def("lock_window", &RadixTree::lock_window, py::arg("node"), py::arg("start"), py::arg("end"))
      .def("unlock_window", &RadixTree::unlock_window, py::arg("node"), py::arg("start"), py::arg("end"))
      .def(
          "evict_window", [](RadixTree& tree, int64_t num_tokens) { return to_numpy(tree.evict_window(num_tokens)); },
          py::arg("num_tokens"))
      .def("take_freed_window", [](RadixTree& tree) { return to_numpy(tree.take_freed_window()); })
      .def("all_window_slots", [](const RadixTree& tree) { return to_numpy(tree.all_window_slots()); })
      .def_property_readonly("window", &RadixTree::window)
      .def_property_readonly("window_evictable", &RadixTree::window_evictable)
      .def_property_readonly("window_locked", &RadixTree::window_locked)
      .def_property_readonly("window_size", &RadixTree::window_size)
      .def_property_readonly("memory_bytes", &RadixTree::memory_bytes)
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
