/* The usual call, in C++: `normalize` of shortest.py, what `LongWay` of launch.py does without a question to Triton, the
   autograd function of fused.py, and the call of native.py. Everything unusual is handed on to these.

   What it takes of torch is public: tensors, `torch::autograd::Function`, guards. On a GPU backward runs in a thread of
   autograd's, and the usual one does without Python, whose lock it would have to get there. */

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace py = pybind11;
using at::Tensor;
using Tensors = c10::SmallVector<Tensor, 4>;
using Numbers = c10::SmallVector<float, 5>;
using Parameter = std::optional<Tensor>;

namespace {

/* --------------------------------------------------------------------------------------------------------------- Python's */

using Held = c10::SafePyObject;  /* may go without Python's lock */

Held hold(const py::object &object) { return {py::object(object).release().ptr(), getPyInterpreter()}; }

py::handle of(const Held &held) { return held.ptr(getPyInterpreter()); }

Tensor tensor_of(py::handle object) {
    if (object.is_none()) return {};
    if (!THPVariable_Check(object.ptr())) throw py::type_error("a tensor or None is needed");
    return THPVariable_Unpack(object.ptr());
}

py::object python_of(const Tensor &tensor) {
    return tensor.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)) : py::none();
}

template <class Of>
py::tuple tuple_of(const Of &tensors) {
    py::tuple made(tensors.size());
    for (size_t i = 0; i < tensors.size(); i++) made[i] = python_of(tensors[i]);
    return made;
}

Tensor there(const Parameter &parameter) { return parameter.value_or(Tensor()); }

template <class Of>
Of *as(py::handle object) {
    static PyObject *const type = py::type::of<Of>().ptr();  /* to look for it would cost more than the rest */
    return reinterpret_cast<PyObject *>(Py_TYPE(object.ptr())) == type ? object.cast<Of *>() : nullptr;
}

Numbers numbers_of(py::handle tuple) {
    if (!PyTuple_Check(tuple.ptr())) throw py::type_error("a tuple of numbers is needed");
    Numbers numbers;
    for (py::handle each : tuple) numbers.push_back(each.cast<float>());
    return numbers;
}

/* -------------------------------------------------------------------------------------------------------------- questions */

c10::DispatchKeySet keys_of(const Tensor &tensor) {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    return (tensor.key_set() | local.included_) - local.excluded_;
}

/* What hears of an op without being among the keys of a tensor: modes, and forward gradients. */
bool nobody_watches() {
    return !c10::impl::TorchDispatchModeTLS::stack_len() && !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

using Dimension = std::optional<size_t>;

/* All that a kernel believes of a tensor but its address; and, by the keys, who else must hear of an op with it. */
struct Like {
    bool there, requires_grad = false;
    Dimension channels;  /* if there is one, it alone must be as long: other sizes, and strides, are left open */
    c10::DispatchKeySet keys;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    c10::Device device = c10::kCPU;
    std::vector<int64_t> sizes, strides;

    Like(const Tensor &tensor, Dimension channels) : there(tensor.defined()), channels(channels) {
        if (!there) return;
        keys = keys_of(tensor), dtype = tensor.scalar_type(), device = tensor.device(), requires_grad = tensor.requires_grad();
        sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
        if (channels && *channels >= sizes.size()) throw py::index_error("a dimension that a tensor has is needed");
    }

    bool operator()(const Tensor &tensor) const {
        if (!there || !tensor.defined()) return there == tensor.defined();
        return keys_of(tensor) == keys && tensor.scalar_type() == dtype && tensor.device() == device &&
               tensor.requires_grad() == requires_grad && lies_like(tensor);
    }

   private:
    bool lies_like(const Tensor &tensor) const {
        const auto other = tensor.sizes();
        if (!channels) return other == sizes && tensor.strides() == strides;
        return other.size() == sizes.size() && other[*channels] == sizes[*channels];
    }
};

/* Whether tensors are as some others were, and of the same classes. */
struct Likes {
    std::vector<Like> each;
    std::vector<PyTypeObject *> classes;

    /* channels: of the first tensor. */
    Likes(const py::args &tensors, Dimension channels) {
        for (py::handle tensor : tensors) {
            each.emplace_back(tensor_of(tensor), each.empty() ? channels : Dimension());
            classes.push_back(Py_TYPE(tensor.ptr()));
        }
    }

    bool operator()(at::ArrayRef<Tensor> tensors) const {
        for (size_t i = 0; i < each.size(); i++)
            if (!each[i](tensors[i])) return false;
        return true;
    }

    bool operator()(PyObject *const *tensors) const {
        for (size_t i = 0; i < each.size(); i++)
            if (Py_TYPE(tensors[i]) != classes[i] || !each[i](tensor_of(tensors[i]))) return false;
        return true;
    }
};

/* -------------------------------------------------------------------------------------------------------------- launching */

constexpr size_t MOST = 32;  /* parameters of a kernel */

using Driver = int (*)(void *function, unsigned across, unsigned down, unsigned deep, unsigned threads, unsigned, unsigned,
                       unsigned shared, void *stream, void **parameters, void **extra);

union Value {
    uint64_t address;
    int32_t integer;
    float number;
};

struct Output {
    std::vector<int64_t> shape, stride;
    c10::ScalarType dtype;
};

/* A kernel on a grid, which fills `outputs`. */
struct Launch {
    std::vector<std::optional<Output>> outputs;
    std::vector<int32_t> integers;  /* parameters behind the tensors */
    unsigned across, down;
    c10::Device device;
    Driver driver = nullptr;
    unsigned threads = 0, shared = 0;
    size_t hidden = 0;                      /* parameters behind all others, that a kernel of ours does not use */
    std::atomic<void *> function{nullptr};  /* the last to be known; until then it is launched by Triton */

    Launch(const py::tuple &like, std::vector<int32_t> integers, std::pair<unsigned, unsigned> grid, c10::Device device)
        : integers(std::move(integers)), across(grid.first), down(grid.second), device(device) {
        for (py::handle each : like) {
            outputs.emplace_back();
            if (each.is_none()) continue;
            auto [shape, stride, dtype] = each.cast<std::tuple<std::vector<int64_t>, std::vector<int64_t>, c10::ScalarType>>();
            outputs.back() = Output{shape, stride, dtype};
        }
    }

    void know(uintptr_t launches, uintptr_t is, unsigned needs, unsigned memory, size_t scratch) {
        if (function) return;
        driver = reinterpret_cast<Driver>(launches), threads = needs, shared = memory, hidden = scratch;
        function = reinterpret_cast<void *>(is);
    }

    /* The outputs, with nothing in place of those that are not asked for; or nothing at all, where the long way is needed. */
    Tensors operator()(at::ArrayRef<Tensor> read, at::ArrayRef<float> numbers) const {
        void *known = function;
        size_t count = read.size() + outputs.size();
        if (!known || read.empty() || count + integers.size() + numbers.size() + hidden > MOST) return {};
        c10::DeviceGuard here(device);
        Value values[MOST];
        Tensors made;
        size_t at = 0;
        auto told = [&](const Tensor &tensor) {
            /* One that is missing is read nowhere. */
            values[at].address = tensor.defined() ? reinterpret_cast<uint64_t>(tensor.const_data_ptr()) : values[0].address;
            /* Its memory is gone; or it is not aligned, which is another kernel's. */
            return values[at].address != 0 && values[at++].address % 16 == 0;
        };
        if (!read[0].defined()) return {};
        for (const Tensor &tensor : read)
            if (!told(tensor)) return {};
        for (const auto &like : outputs) {
            made.push_back(like ? at::empty_strided(like->shape, like->stride, at::device(device).dtype(like->dtype)) : Tensor());
            if (!told(made.back())) return {};
        }
        for (int32_t integer : integers) values[at++].integer = integer;
        for (float number : numbers) values[at++].number = number;
        for (size_t i = 0; i < hidden; i++) values[at++].address = 0;
        void *parameters[MOST];
        for (size_t i = 0; i < at; i++) parameters[i] = &values[i];
        /* It fails in a thread that has no context yet, and where Triton says what is wrong. */
        if (driver(known, across, down, 1, threads, 1, 1, shared, stream(), parameters, nullptr)) return {};
        return made;
    }

    void *stream() const {
        if (device.is_cpu()) return nullptr;
        c10::impl::VirtualGuardImpl of(device.type());
        return of.getStreamNativeHandle(of.getStream(device));
    }
};

using Launches = std::shared_ptr<const Launch>;

/* A launch, and the long way for what it does not know. */
struct Way {
    std::shared_ptr<Launch> launch;
    Held otherwise;
    bool alone;  /* only the first output is returned */

    Way(std::shared_ptr<Launch> launch, const py::object &otherwise, bool alone)
        : launch(std::move(launch)), otherwise(hold(otherwise)), alone(alone) {
        if (!this->launch) throw py::type_error("a launch is needed");
    }

    /* To be called without Python's lock, which the long way gets for itself. */
    Tensors run(at::ArrayRef<Tensor> read, at::ArrayRef<float> numbers) const {
        Tensors made = (*launch)(read, numbers);
        if (!made.empty()) return made;
        py::gil_scoped_acquire gil;
        py::tuple given(read.size() + 1), numbers_given(numbers.size());
        for (size_t i = 0; i < read.size(); i++) given[i] = python_of(read[i]);
        for (size_t i = 0; i < numbers.size(); i++) numbers_given[i] = py::float_(numbers[i]);
        given[read.size()] = numbers_given;
        py::object found = of(otherwise)(*given);
        if (alone) return {tensor_of(found)};
        for (py::handle each : found) made.push_back(tensor_of(each));
        return made;
    }

    /* Tensors that are read, and last a tuple of numbers. */
    py::object operator()(const py::args &given) const {
        if (given.empty()) throw py::type_error("tensors and a tuple of numbers");
        Tensors read;
        for (size_t i = 0; i + 1 < given.size(); i++) read.push_back(tensor_of(given[i]));
        Numbers numbers = numbers_of(given[given.size() - 1]);
        Tensors made;
        {
            py::gil_scoped_release no_gil;
            made = run(read, numbers);
        }
        return alone ? python_of(made[0]) : tuple_of(made);
    }
};

/* A kernel of native.c for rows of a width, wherever they lie. */
struct Native {
    using Function = int (*)(const float *removed, const void *x, const void *weight, const void *bias, void *y, int64_t rows,
                             int64_t width);
    Function function;
    int64_t width;
    bool image;
    Held otherwise;

    Native(uintptr_t function, int64_t width, bool image, const py::object &otherwise)
        : function(reinterpret_cast<Function>(function)), width(width), image(image), otherwise(hold(otherwise)) {
        if (!function || width <= 0) throw py::type_error("a function and a width are needed");
    }

    /* Nothing, where the long way is needed. Without Python's lock. */
    Tensor operator()(Tensor x, const Tensor &weight, const Tensor &bias, at::ArrayRef<float> removed) const {
        x = image ? x.permute({0, 2, 3, 1}).contiguous() : x.contiguous();
        auto gone = [](const Tensor &tensor) { return tensor.defined() && !tensor.const_data_ptr(); };
        auto at = [](const Tensor &tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };
        if (gone(x) || gone(weight) || gone(bias) || removed.size() != 5) return {};
        Tensor y = at::empty_like(x);
        if (function(removed.data(), at(x), at(weight), at(bias), y.mutable_data_ptr(), x.numel() / width, width)) return {};
        return image ? y.permute({0, 3, 1, 2}) : y;
    }
};

/* --------------------------------------------------------------------------------------------------------------- autograd */

/* From x, weight, statistics and dy to gradients: launches, for tensors like some that Python has looked at. */
class WayBack {
    struct Known {
        std::shared_ptr<const Likes> same;
        Launches first, total;  /* the second, if there is one, adds up what the first has left in parts */
    };

    mutable std::mutex one_at_a_time;
    std::shared_ptr<const std::vector<Known>> known = std::make_shared<std::vector<Known>>();  /* the latest first */

   public:
    void learn(std::shared_ptr<const Likes> same, Launches first, Launches total) {
        if (!same || same->each.size() != 4 || !first) throw py::type_error("x, weight, statistics and dy, and a launch");
        auto found = std::make_shared<std::vector<Known>>();
        found->push_back({std::move(same), std::move(first), std::move(total)});
        std::lock_guard lock(one_at_a_time);
        for (size_t i = 0; i < known->size() && i < 3; i++) found->push_back((*known)[i]);
        known = std::move(found);
    }

    Tensors operator()(const Tensor &x, const Tensor &weight, const Tensor &stats, const Tensor &dy, float inverse) const {
        std::shared_ptr<const std::vector<Known>> ways;
        {
            std::lock_guard lock(one_at_a_time);
            ways = known;
        }
        if (c10::GradMode::is_enabled() || !nobody_watches()) return {};
        const Tensor given[] = {x, weight, stats, dy};
        auto way = std::find_if(ways->begin(), ways->end(), [&](const Known &each) { return (*each.same)(given); });
        if (way == ways->end()) return {};
        Tensors made = (*way->first)({x, dy.contiguous(), weight, stats}, {inverse});
        if (made.empty() || !way->total) return made;
        Tensors sums = (*way->total)({made[1]}, {});
        if (sums.empty()) return {};
        return {made[0], sums[0], sums[1]};
    }
};

/* What backward needs of a norm, and of tensors of one kind. */
struct Common {
    std::shared_ptr<const Way> with_stats;
    std::shared_ptr<const WayBack> back;
    Numbers removed;
    Held unusual;  /* the way back in Python, from x, weight, statistics and dy */
};

/* y from x, weight and bias, differentiable. */
class Differentiable {
    /* A tensor, with all in its storage: of what can own something, compiled autograd takes nothing else. */
    Tensor common;

    struct CompensatedLayerNorm : torch::autograd::Function<CompensatedLayerNorm> {
        static Tensor forward(torch::autograd::AutogradContext *context, const Tensor &x, const Parameter &weight,
                              const Parameter &bias, const Differentiable &self) {
            const Common &common = in(self.common);
            Tensors made = common.with_stats->run({x, there(weight), there(bias)}, common.removed);
            TORCH_CHECK(made.size() == 2, "y and statistics are needed, not ", made.size(), " tensors");
            context->save_for_backward({x, there(weight), made[1]});
            context->saved_data["common"] = self.common;
            return made[0];
        }

        static torch::autograd::variable_list backward(torch::autograd::AutogradContext *context,
                                                       torch::autograd::variable_list dy) {
            const Tensor held = context->saved_data["common"].toTensor();
            const Common &common = in(held);
            auto saved = context->get_saved_variables();
            Tensors made = (*common.back)(saved[0], saved[1], saved[2], dy[0], common.removed.back());
            if (made.empty()) {
                py::gil_scoped_acquire gil;
                py::object found = of(common.unusual)(*tuple_of(saved), python_of(dy[0]));
                for (py::handle each : found) made.push_back(tensor_of(each));
            }
            TORCH_CHECK(!made.empty(), "no gradients came back");
            return {made[0], made.size() > 1 ? made[1] : Tensor(), made.size() > 2 ? made[2] : Tensor(), Tensor()};
        }
    };

    static void drop(void *gone) { delete static_cast<Common *>(gone); }

    static const Common &in(const Tensor &tensor) {
        auto *found = tensor.storage().data_ptr().cast_context<Common>(&drop);
        TORCH_CHECK(found, "CompensatedLayerNorm cannot go back, for what its node holds was copied, by a compiler of "
                           "compiled autograd: compile the network as well, or turn compiled autograd off");
        return *found;
    }

   public:
    Differentiable(std::shared_ptr<const Way> with_stats, std::shared_ptr<const WayBack> back, const py::tuple &removed,
                   const py::object &unusual) {
        if (!with_stats || !back || removed.empty()) throw py::type_error("ways and numbers are needed");
        auto *made = new Common{std::move(with_stats), std::move(back), numbers_of(removed), hold(unusual)};
        common = at::for_blob(made, {1}).context(made, drop).options(at::kByte).make_tensor();
    }

    Tensor operator()(const Tensor &x, const Tensor &weight, const Tensor &bias) const {
        auto or_none = [](const Tensor &tensor) { return tensor.defined() ? Parameter(tensor) : Parameter(); };
        return CompensatedLayerNorm::apply(x, or_none(weight), or_none(bias), *this);
    }
};

/* -------------------------------------------------------------------------------------------- `normalize` of shortest.py */

/* names: in a norm, and in globals */
struct Names {
    PyObject *buffers = intern("_buffers"), *statistics = intern("statistics"), *parameters = intern("_parameters");
    PyObject *weight = intern("weight"), *bias = intern("bias"), *known = intern("_known"), *numbers = intern("_numbers");
    PyObject *kept = intern("_kept"), *seen = intern("_seen"), *normalize = intern("_normalize");

    static PyObject *intern(const char *name) { return PyUnicode_InternFromString(name); }
};

const Names &names() {
    static const Names made;
    return made;
}

py::object of(py::handle dict, PyObject *name) {
    PyObject *found = dict && PyDict_Check(dict.ptr()) ? PyDict_GetItemWithError(dict.ptr(), name) : nullptr;
    return py::reinterpret_borrow<py::object>(found);
}

py::object call(py::handle function, PyObject *const *given, size_t count) {
    PyObject *made = PyObject_Vectorcall(function.ptr(), given, count, nullptr);
    if (!made) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

/* Of those that were seen, the one for such tensors; none where it is far behind. */
py::object find(py::handle globals, py::handle kept, py::handle image, PyObject *const *tensors) {
    py::object ways = of(of(globals, names().seen), py::make_tuple(kept, image).ptr());
    if (!ways) return {};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ways.ptr()) && i < 4; i++) {
        py::handle way = PyTuple_GET_ITEM(ways.ptr(), i);
        auto *same = as<Likes>(PyTuple_GET_ITEM(way.ptr(), 0));
        if (same && (*same)(tensors)) return py::reinterpret_borrow<py::object>(way);
    }
    return {};
}

template <class Compute>
py::object without_lock(const Compute &compute) {
    Tensor y;
    {
        py::gil_scoped_release no_gil;
        y = compute();
    }
    return python_of(y);
}

py::object go(py::handle way, PyObject *const *tensors) {
    bool tracked = PyTuple_GET_ITEM(way.ptr(), 1) == Py_True && c10::GradMode::is_enabled();
    auto kernel = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(PyTuple_GET_ITEM(way.ptr(), 2), tracked));
    if (kernel.is_none()) return kernel;
    if (tracked) kernel = kernel[tensors[3]];
    Tensor read[] = {tensor_of(tensors[0]), tensor_of(tensors[1]), tensor_of(tensors[2])};
    if (auto *differentiable = tracked ? as<Differentiable>(kernel) : nullptr)
        return without_lock([&] { return (*differentiable)(read[0], read[1], read[2]); });
    if (tracked) return call(kernel, tensors, 3);
    Numbers removed = numbers_of(tensors[3]);
    if (auto *native = as<Native>(kernel)) {
        py::object y = without_lock([&] { return (*native)(read[0], read[1], read[2], removed); });
        return y.is_none() ? call(of(native->otherwise), tensors, 4) : y;
    }
    if (auto *way = as<Way>(kernel)) return without_lock([&] { return way->run(read, removed)[0]; });
    return call(kernel, tensors, 4);
}

/* normalize(x, norm, image), with the globals of shortest.py. Another thread may exchange what a norm has meanwhile. */
py::object normalize(py::handle globals, PyObject *const *given) {
    const Names &name = names();
    py::handle norm = given[1];
    py::object parameters = of(norm, name.parameters), kept = of(norm, name.kept), known = of(norm, name.known), way;
    py::object weight = of(parameters, name.weight), bias = of(parameters, name.bias), removed = of(norm, name.numbers);
    PyObject *tensors[] = {given[0], weight.ptr(), bias.ptr(), removed.ptr()};
    bool usual = weight && bias && removed && kept && known && known.is(of(of(norm, name.buffers), name.statistics));
    if (usual) {
        way = find(globals, kept, given[2], tensors);
        if (way && nobody_watches()) return go(way, tensors);
    }
    return call(of(globals, name.normalize), given, 3);
}

PyObject *call_normalize(PyObject *globals, PyObject *const *given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (count != 3 || !PyDict_Check(given[1])) return PyErr_Format(PyExc_TypeError, "normalize takes 3, a dict second");
    return normalize(globals, given).release().ptr();
    END_HANDLE_TH_ERRORS
}

PyMethodDef definition = {"normalize", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_normalize)), METH_FASTCALL,
                          nullptr};

py::object normalize_with(const py::dict &globals) {
    for (PyObject *asked : {names().seen, names().normalize})
        if (!of(globals, asked)) throw py::type_error("normalize_with misses " + py::cast<std::string>(asked));
    return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, globals.ptr()));
}

}  // namespace

PYBIND11_MODULE(squeeze_release_usual, module) {
    py::class_<Likes, std::shared_ptr<Likes>>(module, "Likes")
        .def(py::init<const py::args &, Dimension>(), py::kw_only(), py::arg("channels") = py::none())
        .def("__call__", [](const Likes &self, const py::args &tensors) {
            if (tensors.size() != self.each.size()) throw py::type_error("other tensors than it knows");
            return self(reinterpret_cast<PyTupleObject *>(tensors.ptr())->ob_item);
        });
    py::class_<Launch, std::shared_ptr<Launch>>(module, "Launch")
        .def(py::init<const py::tuple &, std::vector<int32_t>, std::pair<unsigned, unsigned>, c10::Device>())
        .def("know", &Launch::know);
    py::class_<Way, std::shared_ptr<Way>>(module, "Way")
        .def(py::init<std::shared_ptr<Launch>, const py::object &, bool>())
        .def_readonly("launch", &Way::launch)
        .def("__call__", &Way::operator());
    py::class_<WayBack, std::shared_ptr<WayBack>>(module, "WayBack").def(py::init<>()).def("learn", &WayBack::learn);
    py::class_<Differentiable>(module, "Differentiable")
        .def(py::init<std::shared_ptr<const Way>, std::shared_ptr<const WayBack>, const py::tuple &, const py::object &>())
        .def("__call__", [](const Differentiable &self, py::handle x, py::handle weight, py::handle bias) {
            Tensor read[] = {tensor_of(x), tensor_of(weight), tensor_of(bias)};
            py::gil_scoped_release no_gil;
            return self(read[0], read[1], read[2]);
        });
    py::class_<Native>(module, "Native")
        .def(py::init<uintptr_t, int64_t, bool, const py::object &>())
        .def("__call__", [](const Native &self, const py::args &given) { return of(self.otherwise)(*given); });
    module.def("normalize_with", &normalize_with);
}
