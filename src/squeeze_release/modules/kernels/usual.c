/* The usual call, in C: `normalize` of shortest.py, what `LongWay` of launch.py does, without a question to Triton, and both
   halves of the autograd function of fused.py. Everything unusual is handed on to these.

   It is Python's C interface and nothing else: of tensors it knows what Python code would, so it fits every torch. The
   driver's function that launches is handed over by its address. Built by Triton's own builder, which has a C compiler. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#define MOST 32   /* parameters of a kernel */

typedef int (*driver)(void *function, unsigned across, unsigned down, unsigned deep, unsigned threads, unsigned, unsigned,
                      unsigned shared, void *stream, void **parameters, void **extra);

typedef union {
    uint64_t address;
    int32_t integer;
    float number;
} parameter;

#define HELD 8    /* the most that an object of ours holds */

typedef struct {
    PyObject_HEAD
    PyObject *held[HELD];
} Holder;

static void take(PyObject **held, PyObject *const *new, int count) {
    for (int i = 0; i < count; i++) Py_XSETREF(held[i], Py_XNewRef(new[i]));
}

static int traverse(Holder *self, visitproc visit, void *arg) {
    for (int i = 0; i < HELD; i++) Py_VISIT(self->held[i]);
    return 0;
}

static int clear(Holder *self) {
    for (int i = 0; i < HELD; i++) Py_CLEAR(self->held[i]);
    return 0;
}

static void end(Holder *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *data_ptr, *zero;  /* a method's name, and a number, of which there is one */

/* -------------------------------------------------------------------------------------------------------------- launching */

enum {
    OTHERWISE,                     /* the long way: for a kernel that is not known yet, and for other tensors than it takes */
    EMPTY, OUTPUTS,                /* from shape, strides and dtype to a tensor; these three of each output, or None */
    INTEGERS,                      /* parameters behind the tensors */
    CURRENT_DEVICE, CURRENT_STREAM, DEVICE,
    OF_LAUNCH
};

typedef struct {
    PyObject_HEAD                  /* as a Holder begins */
    PyObject *held[HELD];
    vectorcallfunc call;
    driver launch;
    void *function;                /* NULL: not known yet */
    unsigned across, down, threads, shared;
    int hidden;                    /* parameters behind all others, that a kernel of ours does not use */
    int alone;                     /* only the first output is returned */
} Launch;

static int address_of(PyObject *tensor, uint64_t *address) {
    PyObject *number = PyObject_VectorcallMethod(data_ptr, &tensor, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (number == NULL) return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int ask(PyObject *function, PyObject *argument, uint64_t *answer) {
    PyObject *number = argument ? PyObject_CallOneArg(function, argument) : PyObject_CallNoArgs(function);
    if (number == NULL) return -1;
    *answer = (uint64_t)PyLong_AsLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* 1: tensors for the kernel; 0: others; -1: an error. One that is missing is read nowhere; its address is that of the first. */
static int read_tensors(PyObject *const *tensors, Py_ssize_t count, parameter *into) {
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i].address = i > 0 ? into[0].address : 0;
        if (tensors[i] == Py_None && i > 0) continue;
        if (address_of(tensors[i], &into[i].address) < 0) return -1;
        if (into[i].address == 0 || into[i].address & 15) return 0;  /* its memory is gone; another kernel reads this one */
    }
    return 1;
}

static PyObject *fill(Launch *self, parameter *first, parameter *into, int *fits) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->held[OUTPUTS]);
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *like = PyTuple_GET_ITEM(self->held[OUTPUTS], i), *tensor = Py_NewRef(Py_None);
        into[i].address = first->address;
        if (like != Py_None) {
            Py_SETREF(tensor, PyObject_Call(self->held[EMPTY], like, NULL));
            if (tensor == NULL || address_of(tensor, &into[i].address) < 0) {
                Py_XDECREF(tensor);
                Py_CLEAR(made);
                break;
            }
            if (into[i].address == 0 || into[i].address & 15) *fits = 0;
        }
        PyTuple_SET_ITEM(made, i, tensor);
    }
    return made;
}

/* Tensors that are read, and last a tuple of numbers. */
static PyObject *call(PyObject *of, PyObject *const *arguments, size_t flags, PyObject *names) {
    Launch *self = (Launch *)of;
    if (self->held[OTHERWISE] == NULL) return PyErr_Format(PyExc_RuntimeError, "a launch without its way");
    Py_ssize_t read = PyVectorcall_NARGS(flags) - 1, filled = PyTuple_GET_SIZE(self->held[OUTPUTS]), count = read + filled;
    Py_ssize_t integers = PyTuple_GET_SIZE(self->held[INTEGERS]);
    parameter values[MOST];
    void *parameters[MOST];
    uint64_t stream, here;
    int fits = 1;
    if (self->function == NULL || names != NULL || read < 1 || !PyTuple_Check(arguments[read])) goto otherwise;
    if (count + integers + PyTuple_GET_SIZE(arguments[read]) + self->hidden > MOST) goto otherwise;
    if (ask(self->held[CURRENT_DEVICE], NULL, &here) < 0 || ask(self->held[CURRENT_STREAM], self->held[DEVICE], &stream) < 0) return NULL;
    if (here != (uint64_t)PyLong_AsLongLong(self->held[DEVICE])) goto otherwise;
    int there = read_tensors(arguments, read, values);
    if (there < 0) return NULL;
    if (there == 0) goto otherwise;

    PyObject *made = fill(self, values, values + read, &fits);
    if (made == NULL) return NULL;
    for (Py_ssize_t i = 0; i < integers; i++)
        values[count++].integer = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(self->held[INTEGERS], i));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[read]); i++)
        values[count++].number = (float)PyFloat_AsDouble(PyTuple_GET_ITEM(arguments[read], i));
    for (int i = 0; i < self->hidden; i++) values[count++].address = 0;
    for (Py_ssize_t i = 0; i < count; i++) parameters[i] = &values[i];
    if (PyErr_Occurred() || !fits) Py_CLEAR(made);
    if (PyErr_Occurred()) return NULL;
    if (!fits) goto otherwise;
    int failed;
    Py_BEGIN_ALLOW_THREADS  /* it waits where many kernels wait already */
    failed = self->launch(self->function, self->across, self->down, 1, self->threads, 1, 1, self->shared,
                          (void *)(uintptr_t)stream, parameters, NULL);
    Py_END_ALLOW_THREADS
    if (failed) {  /* a thread that has no context yet, or an error of which Triton says what it is */
        Py_DECREF(made);
        goto otherwise;
    }
    if (!self->alone) return made;
    PyObject *only = Py_NewRef(PyTuple_GET_ITEM(made, 0));
    Py_DECREF(made);
    return only;

otherwise:
    return PyObject_Vectorcall(self->held[OTHERWISE], arguments, flags & ~PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

/* Launch(otherwise, empty, outputs, integers, alone, (across, down), (current_device, current_stream, device)) */
static int begin(Launch *self, PyObject *arguments, PyObject *names) {
    PyObject *new[OF_LAUNCH];
    if (!PyArg_ParseTuple(arguments, "OOO!O!p(II)(OOO!)", &new[0], &new[1], &PyTuple_Type, &new[2], &PyTuple_Type, &new[3],
                          &self->alone, &self->across, &self->down, &new[4], &new[5], &PyLong_Type, &new[6]))
        return -1;
    take(self->held, new, OF_LAUNCH);
    self->call = call;
    return 0;
}

/* know(address of the driver's function, address of the kernel, threads, shared, hidden): from now on it is launched here. */
static PyObject *know(Launch *self, PyObject *arguments) {
    unsigned long long launch, function;
    if (!PyArg_ParseTuple(arguments, "KKIIi", &launch, &function, &self->threads, &self->shared, &self->hidden)) return NULL;
    self->launch = (driver)(uintptr_t)launch;
    self->function = (void *)(uintptr_t)function;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"know", (PyCFunction)know, METH_VARARGS, NULL}, {NULL}};

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "squeeze_release_usual.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launch, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)begin,
    .tp_dealloc = (destructor)end,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_methods = methods,
};

/* ------------------------------------------------------------------------------------------------------------- questions */

static PyObject *_current_level;  /* a name */

static int answers(PyObject *question, PyObject *answer) {
    PyObject *found = PyObject_CallNoArgs(question);
    Py_XDECREF(found);  /* what is looked for stays */
    return found == answer;
}

static int nobody_differentiates_forward(PyObject *forward_ad) {
    PyObject *level = PyObject_GetAttr(forward_ad, _current_level);
    int nobody = level != NULL && PyLong_AsLong(level) < 0 && !PyErr_Occurred();
    Py_XDECREF(level);
    return nobody;
}

/* ------------------------------------------------------------------------------------------------------------- autograd */

enum {
    WITH_STATS, REMOVED,           /* a launch to y and statistics, and the numbers for it */
    ROWS,                          /* its `way_back`: whether tensors are as some seen before, and the launch to gradients */
    UNUSUAL,                       /* the way back in Python, from x, weight, statistics and dy */
    IS_GRAD_ENABLED, COUNT_MODES, FORWARD_AD,
    INVERSE,                       /* the number for the way back, in a tuple */
    OF_HALVES
};

static PyObject *save_for_backward, *saved_tensors, *way_back;  /* names */

/* forward(ctx, x, weight, bias) */
static PyObject *forward(Holder *self, PyObject *const *given, Py_ssize_t count) {
    PyObject *done = NULL, *y = NULL;
    if (count != 4 || self->held[ROWS] == NULL) return PyErr_Format(PyExc_TypeError, "forward takes 4, not %zd", count);
    PyObject *all[] = {given[1], given[2], given[3], self->held[REMOVED]};
    PyObject *made = PyObject_Vectorcall(self->held[WITH_STATS], all, 4, NULL);
    if (made && PyTuple_Check(made) && PyTuple_GET_SIZE(made) == 2) {
        PyObject *saved[] = {given[0], given[1], given[2], PyTuple_GET_ITEM(made, 1)};
        done = PyObject_VectorcallMethod(save_for_backward, saved, 4, NULL);
        if (done) y = Py_NewRef(PyTuple_GET_ITEM(made, 0));
    } else if (made) PyErr_SetString(PyExc_TypeError, "forward needs y and statistics");
    Py_XDECREF(made);
    Py_XDECREF(done);
    return y;
}

/* backward(ctx, dy). What was saved is unpacked once: whoever computes it anew does so only once. */
static PyObject *backward(Holder *self, PyObject *const *given, Py_ssize_t count) {
    PyObject *way = NULL, *same = NULL, *made = NULL;
    if (count != 2 || self->held[ROWS] == NULL) return PyErr_Format(PyExc_TypeError, "backward takes 2, not %zd", count);
    PyObject *saved = PyObject_GetAttr(given[0], saved_tensors);
    if (saved && PyTuple_Check(saved) && PyTuple_GET_SIZE(saved) == 3) way = PyObject_GetAttr(self->held[ROWS], way_back);
    else if (saved) PyErr_SetString(PyExc_RuntimeError, "CompensatedLayerNorm has saved three tensors");
    if (way) {
        PyObject *x = PyTuple_GET_ITEM(saved, 0), *weight = PyTuple_GET_ITEM(saved, 1), *stats = PyTuple_GET_ITEM(saved, 2);
        PyObject *asked[] = {x, weight, stats, given[1]}, *read[] = {x, given[1], weight, stats, self->held[INVERSE]};
        same = PyObject_Vectorcall(PyTuple_GET_ITEM(way, 0), asked, 4, NULL);
        if (same == Py_True && answers(self->held[IS_GRAD_ENABLED], Py_False) && answers(self->held[COUNT_MODES], zero) &&
            nobody_differentiates_forward(self->held[FORWARD_AD]))
            made = PyObject_Vectorcall(PyTuple_GET_ITEM(way, 1), read, 5, NULL);
        else if (!PyErr_Occurred())
            made = PyObject_Vectorcall(self->held[UNUSUAL], asked, 4, NULL);
    }
    Py_XDECREF(saved);
    Py_XDECREF(way);
    Py_XDECREF(same);
    return made;
}

/* Halves(with_stats, removed, rows, unusual, (is_grad_enabled, count_modes, forward_ad)) */
static int begin_halves(Holder *self, PyObject *arguments, PyObject *names) {
    PyObject *new[OF_HALVES];
    if (!PyArg_ParseTuple(arguments, "OO!OO(OOO)", &new[0], &PyTuple_Type, &new[1], &new[2], &new[3], &new[4], &new[5],
                          &new[6]))
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(new[REMOVED]);
    if ((new[INVERSE] = PyTuple_GetSlice(new[REMOVED], count - 1, count)) == NULL) return -1;
    take(self->held, new, OF_HALVES);
    Py_DECREF(new[INVERSE]);
    return 0;
}

static PyMethodDef methods_of_halves[] = {{"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL},
                                          {"backward", (PyCFunction)(void (*)(void))backward, METH_FASTCALL, NULL},
                                          {NULL}};

static PyTypeObject HalvesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "squeeze_release_usual.Halves",
    .tp_basicsize = sizeof(Holder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)begin_halves,
    .tp_dealloc = (destructor)end,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_methods = methods_of_halves,
};

/* A function as a method of who has it as an attribute: those of C are none otherwise. */
static PyObject *method(PyObject *module, PyObject *function) { return PyInstanceMethod_New(function); }

/* -------------------------------------------------------------------------------------------- `normalize` of shortest.py */

/* names: in a norm, and in globals */
static PyObject *_buffers, *statistics, *_parameters, *weight, *bias, *_known, *_numbers, *_kept, *is_nested;
static PyObject *_seen, *_normalize, *count_modes, *is_grad_enabled, *forward_ad;

#define OF(dict, name) PyDict_GetItemWithError(dict, name)

/* Of those that were seen, the one for such tensors; NULL where there is none, or it is far behind, or an error. */
static PyObject *find(PyObject *globals, PyObject *kept, PyObject *image, PyObject *const *tensors) {
    PyObject *kind = PyTuple_Pack(2, kept, image), *all = OF(globals, _seen), *found = NULL;
    PyObject *ways = kind && all ? Py_XNewRef(OF(all, kind)) : NULL;
    for (Py_ssize_t i = 0; ways && i < PyTuple_GET_SIZE(ways) && i < 4 && !found; i++) {
        PyObject *way = PyTuple_GET_ITEM(ways, i), *same = PyObject_Vectorcall(PyTuple_GET_ITEM(way, 0), tensors, 3, NULL);
        if (same == NULL) break;
        if (same == Py_True) found = Py_NewRef(way);
        Py_DECREF(same);
    }
    Py_XDECREF(ways);
    Py_XDECREF(kind);
    return found;
}

static PyObject *go(PyObject *globals, PyObject *way, PyObject *const *tensors) {
    PyObject *kernels = PyTuple_GET_ITEM(way, 2), *removed = tensors[3], *y = NULL;
    int tracked = PyTuple_GET_ITEM(way, 1) == Py_True && answers(OF(globals, is_grad_enabled), Py_True);
    PyObject *kernel = PyTuple_GET_ITEM(kernels, tracked);
    if (PyErr_Occurred()) return NULL;
    if (kernel == Py_None) return Py_NewRef(kernel);
    if (!tracked) return PyObject_Vectorcall(kernel, tensors, 4, NULL);
    PyObject *apply = PyObject_GetItem(kernel, removed);
    if (apply) y = PyObject_Vectorcall(apply, tensors, 3, NULL);
    Py_XDECREF(apply);
    return y;
}

/* normalize(x, norm, image), with the globals of shortest.py. Another thread may exchange what a norm has meanwhile. */
static PyObject *normalize(PyObject *globals, PyObject *const *given, Py_ssize_t count) {
    PyObject *result = NULL, *way = NULL, *held[4] = {NULL};
    if (count != 3 || !PyDict_Check(given[1])) return PyErr_Format(PyExc_TypeError, "normalize takes 3, a dict second");
    PyObject *nested = PyObject_GetAttr(given[0], is_nested), *norm = given[1];
    PyObject *buffers = OF(norm, _buffers), *parameters = OF(norm, _parameters), *kept = Py_XNewRef(OF(norm, _kept));
    PyObject *known = buffers ? OF(buffers, statistics) : NULL;
    if (nested == Py_False && parameters && kept && known && known == OF(norm, _known)) {
        PyObject *now[] = {given[0], OF(parameters, weight), OF(parameters, bias), OF(norm, _numbers)};
        take(held, now, 4);
        if (held[1] && held[2] && held[3]) way = find(globals, kept, given[2], held);
    }
    if (way && answers(OF(globals, count_modes), zero) && nobody_differentiates_forward(OF(globals, forward_ad)))
        result = go(globals, way, held);
    else if (!PyErr_Occurred())
        result = PyObject_Vectorcall(OF(globals, _normalize), given, 3, NULL);
    Py_XDECREF(nested);
    Py_XDECREF(kept);
    Py_XDECREF(way);
    for (int i = 0; i < 4; i++) Py_XDECREF(held[i]);
    return result;
}

static PyMethodDef definition = {"normalize", (PyCFunction)(void (*)(void))normalize, METH_FASTCALL, NULL};

static PyObject *normalize_with(PyObject *module, PyObject *globals) {
    PyObject *asked[] = {_seen, _normalize, count_modes, is_grad_enabled, forward_ad};
    if (!PyDict_Check(globals)) return PyErr_Format(PyExc_TypeError, "normalize_with takes a dict");
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++)
        if (OF(globals, asked[i]) == NULL) return PyErr_Format(PyExc_TypeError, "normalize_with misses %U", asked[i]);
    return PyCFunction_New(&definition, globals);
}

static PyMethodDef functions[] = {{"method", method, METH_O, NULL}, {"normalize_with", normalize_with, METH_O, NULL}, {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "squeeze_release_usual", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_squeeze_release_usual(void) {
#define NAME(of) {&of, #of}
    struct {
        PyObject **name;
        const char *text;
    } names[] = {NAME(data_ptr), NAME(_current_level), NAME(save_for_backward), NAME(saved_tensors), NAME(way_back),
                 NAME(_buffers), NAME(statistics), NAME(_parameters), NAME(weight), NAME(bias), NAME(_known), NAME(_numbers),
                 NAME(_kept), NAME(is_nested), NAME(_seen), NAME(_normalize), NAME(count_modes), NAME(is_grad_enabled),
                 NAME(forward_ad)};
    zero = PyLong_FromLong(0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL) return NULL;
    if (zero == NULL || PyType_Ready(&LaunchType) < 0 || PyType_Ready(&HalvesType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddObject(made, "Launch", Py_NewRef((PyObject *)&LaunchType)) < 0 ||
        PyModule_AddObject(made, "Halves", Py_NewRef((PyObject *)&HalvesType)) < 0)
        return NULL;
    return made;
}
