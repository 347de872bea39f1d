/* The hot paths of the hooks in C: see docs/decisions/054-compiled-hooks.md.

   Each type here does the common case of a Python function of the same package
   and calls that function, `slow`, for every other case, before it has changed
   anything. Where this file is not compiled, the Python functions run alone,
   and the tests run with both. No function here waits, prints or keeps a
   tensor. All run with the interpreter's lock. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t); /* as time.monotonic_ns and time.perf_counter_ns */
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- slots of Python objects
 * ------------------------------------------------------------------- */

/* The place of a slot in instances of *type*; -1 with an exception where it has
 * no such slot. */
static Py_ssize_t slot_of(PyObject* type, const char* name) {
  PyObject* descriptor = PyObject_GetAttrString(type, name);
  if (!descriptor) return -1;
  Py_ssize_t offset = -1;
  if (Py_IS_TYPE(descriptor, &PyMemberDescr_Type))
    offset = ((PyMemberDescrObject*)descriptor)->d_member->offset;
  else
    PyErr_Format(PyExc_TypeError, "%s is no slot", name);
  Py_DECREF(descriptor);
  return offset;
}

static int slots_of(PyObject* type, const char* const* names, Py_ssize_t* offsets, int count) {
  for (int i = 0; i < count; i++)
    if ((offsets[i] = slot_of(type, names[i])) < 0) return -1;
  return 0;
}

/* A borrowed reference; NULL where the slot is empty. */
static inline PyObject* get_slot(PyObject* owner, Py_ssize_t offset) {
  return *(PyObject**)((char*)owner + offset);
}

/* Takes over the reference to *value*. */
static inline void set_slot(PyObject* owner, Py_ssize_t offset, PyObject* value) {
  PyObject **slot = (PyObject**)((char*)owner + offset), *old = *slot;
  *slot = value;
  Py_XDECREF(old);
}

static inline long long get_int(PyObject* owner, Py_ssize_t offset) {
  PyObject* value = get_slot(owner, offset);
  return value ? PyLong_AsLongLong(value) : -1;
}

static inline int set_int(PyObject* owner, Py_ssize_t offset, long long value) {
  PyObject* number = PyLong_FromLongLong(value);
  if (!number) return -1;
  set_slot(owner, offset, number);
  return 0;
}

enum {
  MODE,
  CALLS,
  UNIT,
  ENGINE,
  TIMING,
  SPENT_NS,
  HEAD_WORD,
  THREAD,
  DETAILED,
  PHASE,
  SAMPLED_NS,
  SAMPLED_CALLS,
  BACKWARD_THREAD,
  CONTEXT_SLOTS
};
static const char* const context_names[] = {
    "mode",   "calls",    "unit",  "engine",     "timing",        "spent_ns",       "head_word",
    "thread", "detailed", "phase", "sampled_ns", "sampled_calls", "backward_thread"};

enum { ISSUED, POINT_TO_POINT, GROUP_ID, SIZE, ON_DEVICE, COALESCING, EVEN, GROUP_SLOTS };
static const char* const group_names[] = {"issued",    "point_to_point", "id",  "size",
                                          "on_device", "coalescing",     "even"};

static long long kind_unit; /* Kind.UNIT */
/* One of each: the agent has one class of either. */
static Py_ssize_t of_context[CONTEXT_SLOTS], of_group[GROUP_SLOTS];
static PyObject *context_type, *group_type;
static PyObject *skip, *raised; /* around.SKIP and around.RAISED */
static PyObject *str_nbytes, *str_dtype, *str_async, *str_device, *str_type, *str_is_cpu, *str_unit;

#define CONTEXT(self, name) get_int((self)->context, of_context[name])

/* ---- the writer of records
 * --------------------------------------------------------------------- */

typedef struct {
  uint64_t number;
  int64_t t_ns;
  uint32_t head, place;
  int64_t a, b, c, d;
  uint64_t end_number;
} Record;

typedef struct {
  PyObject_HEAD PyObject* records; /* keeps the memory; its buffer is used as
                                      long as *muted* is empty */
  PyObject* muted;
  Record* at;
  uint64_t mask, next;
} Recorder;

static PyTypeObject RecorderType;

/* Writes nothing once the ring is muted: close() sets that before it gives the
 * memory back. */
static inline void put(Recorder* self, int64_t t_ns, uint32_t head, uint32_t place, int64_t a, int64_t b,
                       int64_t c, int64_t d) {
  if (PyList_GET_SIZE(self->muted)) return;
  uint64_t n = self->next++;
  volatile Record* record = self->at + (n & self->mask);
  record->number = n; /* volatile keeps the order of the stores, and so does x86-64 */
  record->t_ns = t_ns;
  record->head = head;
  record->place = place;
  record->a = a;
  record->b = b;
  record->c = c;
  record->d = d;
  record->end_number = n;
}

static int recorder_init(Recorder* self, PyObject* args, PyObject* kwargs) {
  PyObject *records, *muted;
  unsigned long long capacity, next;
  if (!PyArg_ParseTuple(args, "OO!KK", &records, &PyList_Type, &muted, &capacity, &next)) return -1;
  Py_buffer view;
  if (PyObject_GetBuffer(records, &view, PyBUF_WRITABLE) < 0) return -1;
  self->at = view.buf;
  int fits = (unsigned long long)view.len >= capacity * sizeof(Record) && !(capacity & (capacity - 1));
  PyBuffer_Release(&view); /* else the ring could not be closed */
  if (!fits) {
    PyErr_SetString(PyExc_ValueError, "the memory is too small");
    return -1;
  }
  Py_XSETREF(self->records, Py_NewRef(records));
  Py_XSETREF(self->muted, Py_NewRef(muted));
  self->mask = capacity - 1;
  self->next = next;
  return 0;
}

static void recorder_dealloc(Recorder* self) {
  Py_XDECREF(self->records);
  Py_XDECREF(self->muted);
  Py_TYPE(self)->tp_free((PyObject*)self);
}

static int integers(PyObject* const* args, Py_ssize_t count, Py_ssize_t wanted, long long* values) {
  if (count != wanted) {
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, count);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    values[i] = PyLong_AsLongLong(args[i]);
    if (values[i] == -1 && PyErr_Occurred()) return -1;
  }
  return 0;
}

static PyObject* recorder_write(Recorder* self, PyObject* const* args, Py_ssize_t count) {
  long long v[7];
  if (integers(args, count, 7, v) < 0) return NULL;
  put(self, v[0], (uint32_t)v[1], (uint32_t)v[2], v[3], v[4], v[5], v[6]);
  Py_RETURN_NONE;
}

static PyObject* recorder_write_fields(Recorder* self, PyObject* const* args, Py_ssize_t count) {
  long long v[11];
  if (integers(args, count, 11, v) < 0) return NULL;
  uint32_t head = (uint32_t)(v[1] | v[2] << 8 | v[3] << 16 | v[4] << 24);
  put(self, v[0], head, (uint32_t)(v[5] | v[6]), v[7], v[8], v[9], v[10]);
  Py_RETURN_NONE;
}

/* mark(context, slow, event, unit, blocked_ns=0): Units.mark, which is `slow` in detailed steps. */
static PyObject* recorder_mark(Recorder* self, PyObject* const* args, Py_ssize_t count) {
  long long v[3] = {0, 0, 0};
  if (count < 4 || (PyObject*)Py_TYPE(args[0]) != context_type) {
    PyErr_SetString(PyExc_TypeError, "mark(context, slow, event, unit, blocked_ns=0)");
    return NULL;
  }
  if (get_slot(args[0], of_context[DETAILED]) != Py_False)
    return PyObject_Vectorcall(args[1], args + 2, count - 2, NULL);
  if (integers(args + 2, count - 2, count < 5 ? 2 : 3, v) < 0) return NULL;
  uint32_t head = (uint32_t)(kind_unit | v[0] << 8 | get_int(args[0], of_context[PHASE]) << 16);
  put(self, now_ns(), head, (uint32_t)v[1], v[2], -1, 0, 0);
  Py_RETURN_NONE;
}

static PyObject* recorder_following(Recorder* self, PyObject* unused) {
  return PyLong_FromUnsignedLongLong(self->next++);
}

static PyMethodDef recorder_methods[] = {
    {"write", (PyCFunction)(void (*)(void))recorder_write, METH_FASTCALL, "As RingWriter.write."},
    {"write_fields", (PyCFunction)(void (*)(void))recorder_write_fields, METH_FASTCALL,
     "As HookContext.write."},
    {"mark", (PyCFunction)(void (*)(void))recorder_mark, METH_FASTCALL, "As Units.mark."},
    {"following", (PyCFunction)recorder_following, METH_NOARGS, "As Slots.following."},
    {NULL}};

static PyMemberDef recorder_members[] = {
    {"next", T_ULONGLONG, offsetof(Recorder, next), READONLY, "The number of the next record."}, {NULL}};

static PyTypeObject RecorderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zeromon_agents.runtime.compiled_hooks.Recorder",
    .tp_doc =
        "Recorder(records, muted, capacity, next): writes records into a "
        "ring's memory.",
    .tp_basicsize = sizeof(Recorder),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)recorder_init,
    .tp_dealloc = (destructor)recorder_dealloc,
    .tp_methods = recorder_methods,
    .tp_members = recorder_members,
};

/* ---- what all wrappers of a function have
 * ------------------------------------------------------- */

#define OBJECTS 13
typedef struct {
  PyObject_HEAD PyObject *dict, *weak; /* where functools.wraps keeps name and text of the function */
  vectorcallfunc call;
  PyObject *context, *original, *slow;
  PyObject* object[OBJECTS]; /* what one type needs: the names are below */
  Recorder* recorder;
  long long number[5];
} Hook;

static int hook_traverse(Hook* self, visitproc visit, void* arg) {
  Py_VISIT(self->dict);
  Py_VISIT(self->context);
  Py_VISIT(self->original);
  Py_VISIT(self->slow);
  Py_VISIT((PyObject*)self->recorder);
  for (int i = 0; i < OBJECTS; i++)
    Py_VISIT(self->object[i]);
  return 0;
}

static int hook_clear(Hook* self) {
  Py_CLEAR(self->dict);
  Py_CLEAR(self->context);
  Py_CLEAR(self->original);
  Py_CLEAR(self->slow);
  Py_CLEAR(self->recorder);
  for (int i = 0; i < OBJECTS; i++)
    Py_CLEAR(self->object[i]);
  return 0;
}

static void hook_dealloc(Hook* self) {
  PyObject_GC_UnTrack(self);
  if (self->weak) PyObject_ClearWeakRefs((PyObject*)self);
  hook_clear(self);
  Py_TYPE(self)->tp_free((PyObject*)self);
}

static PyObject* hook_get(PyObject* self, PyObject* owner, PyObject* type) {
  return owner && owner != Py_None ? PyMethod_New(self, owner) : Py_NewRef(self);
}

static PyObject* hook_repr(Hook* self) { return PyUnicode_FromFormat("<hook on %R>", self->original); }

/* As Python's functions: a copy is the function itself, and a pickle has its
 * name. */
static PyObject* hook_copy(PyObject* self, PyObject* unused) { return Py_NewRef(self); }

static PyObject* hook_reduce(PyObject* self, PyObject* unused) {
  return PyObject_GetAttrString(self, "__qualname__");
}

static PyMethodDef hook_methods[] = {{"__copy__", hook_copy, METH_NOARGS, NULL},
                                     {"__deepcopy__", hook_copy, METH_O, NULL},
                                     {"__reduce__", hook_reduce, METH_NOARGS, NULL},
                                     {NULL}};

static PyGetSetDef hook_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL}, {NULL}};

#define HOOK_TYPE(name, new, text)                                                                     \
  {                                                                                                    \
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "zeromon_agents.runtime.compiled_hooks." name,            \
                                .tp_doc = text, .tp_basicsize = sizeof(Hook),                          \
                                .tp_dictoffset = offsetof(Hook, dict),                                 \
                                .tp_weaklistoffset = offsetof(Hook, weak),                             \
                                .tp_vectorcall_offset = offsetof(Hook, call),                          \
                                .tp_call = PyVectorcall_Call, .tp_descr_get = hook_get,                \
                                .tp_repr = (reprfunc)hook_repr,                                        \
                                .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |                  \
                                            Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, \
                                .tp_new = new, .tp_dealloc = (destructor)hook_dealloc,                 \
                                .tp_getset = hook_attributes,                                          \
                                .tp_traverse = (traverseproc)hook_traverse,                            \
                                .tp_clear = (inquiry)hook_clear, .tp_methods = hook_methods            \
  }

/* Reads the arguments of a type: context, original, slow, recorder, *objects*
 * and *numbers*. */
static PyObject* new_hook(PyTypeObject* type, PyObject* args, vectorcallfunc call, int objects,
                          int numbers) {
  if (PyTuple_GET_SIZE(args) != 4 + objects + numbers) {
    PyErr_Format(PyExc_TypeError, "%d arguments, not %zd", 4 + objects + numbers,
                 PyTuple_GET_SIZE(args));
    return NULL;
  }
  PyObject* recorder = PyTuple_GET_ITEM(args, 3);
  if ((PyObject*)Py_TYPE(PyTuple_GET_ITEM(args, 0)) != context_type ||
      !Py_IS_TYPE(recorder, &RecorderType)) {
    PyErr_SetString(PyExc_TypeError, "no context, or no recorder");
    return NULL;
  }
  Hook* self = (Hook*)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->call = call;
  self->context = Py_NewRef(PyTuple_GET_ITEM(args, 0));
  self->original = Py_NewRef(PyTuple_GET_ITEM(args, 1));
  self->slow = Py_NewRef(PyTuple_GET_ITEM(args, 2));
  self->recorder = (Recorder*)Py_NewRef(recorder);
  for (int i = 0; i < objects; i++)
    self->object[i] = Py_NewRef(PyTuple_GET_ITEM(args, 4 + i));
  for (int i = 0; i < numbers; i++) {
    self->number[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(args, 4 + objects + i));
    if (self->number[i] == -1 && PyErr_Occurred()) {
      Py_DECREF(self);
      return NULL;
    }
  }
  return (PyObject*)self;
}

/* Whether the hook's error is one that it counts: Guard.CAUGHT. Then it is
 * counted, and is gone. */
static int note_error(PyObject* note, PyObject* label) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return 0;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  PyObject* noted = PyObject_CallFunctionObjArgs(note, value, label, NULL);
  Py_XDECREF(noted);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return noted != NULL;
}

/* ---- a wrapped function: around._hook_decorator
 * ------------------------------------------------- */

enum { NOTE, LABEL, BEFORE, AFTER, HAPPENS, UNITS }; /* None where there is none */
enum { ACTIVE_FROM, SCOPED, SUBJECT, EVENT_CODE };

/* Adds what a hook did since *began*, as HookContext.sample. */
static int sample(Hook* self, int64_t began, int calls) {
  int64_t spent = CONTEXT(self, SPENT_NS);
  if (calls && set_int(self->context, of_context[SAMPLED_CALLS], CONTEXT(self, SAMPLED_CALLS) + 1) < 0)
    return -1;
  return set_int(self->context, of_context[SAMPLED_NS],
                 CONTEXT(self, SAMPLED_NS) + now_ns() - spent - began);
}

/* Sets unit and engine of the argument, where it has some: Gathers.fetch_begins. */
static int enter_known_unit(Hook* self, PyObject* subject) {
  PyObject* key = PyLong_FromVoidPtr(subject);
  PyObject* kept = key ? PyDict_GetItemWithError(self->object[UNITS], key) : NULL;
  Py_XDECREF(key);
  if (!kept) return PyErr_Occurred() ? -1 : 1;
  if (!PyTuple_Check(kept) || PyTuple_GET_SIZE(kept) < 2) return 0;
  set_slot(self->context, of_context[UNIT], Py_NewRef(PyTuple_GET_ITEM(kept, 0)));
  set_slot(self->context, of_context[ENGINE], Py_NewRef(PyTuple_GET_ITEM(kept, 1)));
  return 1;
}

/* Sets the unit of the owner, and writes its event: Units.within. 0: the Python
 * function has to. */
static int enter_unit(Hook* self, PyObject* const* args, Py_ssize_t count) {
  if (self->number[SUBJECT] < 0 || self->number[SUBJECT] >= count) return 0;
  if (self->object[UNITS] != Py_None) return enter_known_unit(self, args[self->number[SUBJECT]]);
  int has_event = self->number[EVENT_CODE] >= 0;
  if (has_event && get_slot(self->context, of_context[DETAILED]) != Py_False) return 0;
  PyObject* kept = PyObject_GetAttr(args[self->number[SUBJECT]], str_unit);
  if (!kept) {
    PyErr_Clear();
    return 0;
  }
  int is_known = PyTuple_CheckExact(kept) && PyTuple_GET_SIZE(kept) == 2 &&
                 PyTuple_GET_ITEM(kept, 0) == self->context;
  if (is_known) set_slot(self->context, of_context[UNIT], Py_NewRef(PyTuple_GET_ITEM(kept, 1)));
  Py_DECREF(kept);
  if (!is_known || !has_event) return is_known;
  if (self->object[HAPPENS] != Py_None) {
    PyObject* happens = PyObject_Vectorcall(self->object[HAPPENS], args, count, NULL);
    int truth = happens ? PyObject_IsTrue(happens) : -1;
    Py_XDECREF(happens);
    if (truth <= 0) return truth < 0 ? -1 : 1;
  }
  long long unit = CONTEXT(self, UNIT), phase = CONTEXT(self, PHASE);
  uint32_t head = (uint32_t)(kind_unit | self->number[EVENT_CODE] << 8 | phase << 16);
  put(self->recorder, now_ns(), head, (uint32_t)unit, 0, -1, 0, 0);
  return 1;
}

static PyObject* call_wrapped(PyObject* hook, PyObject* const* args, size_t nargsf, PyObject* names) {
  Hook* self = (Hook*)hook;
  PyObject* context = self->context;
  if (CONTEXT(self, MODE) < self->number[ACTIVE_FROM])
    return PyObject_Vectorcall(self->original, args, nargsf, names);
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  PyObject *note = self->object[NOTE], *label = self->object[LABEL];
  PyObject *unit = NULL, *engine = NULL, *state = Py_NewRef(Py_None), *result = NULL;
  if (set_int(context, of_context[CALLS], CONTEXT(self, CALLS) + 1) < 0) goto fail;
  if (self->number[SCOPED]) {
    unit = Py_XNewRef(get_slot(context, of_context[UNIT]));
    engine = Py_XNewRef(get_slot(context, of_context[ENGINE]));
  }
  int is_timed = get_slot(context, of_context[TIMING]) == Py_True;
  int64_t began = is_timed ? now_ns() - CONTEXT(self, SPENT_NS) : 0;
  if (self->object[BEFORE] != Py_None) {
    int is_plain = !names || self->object[UNITS] != Py_None; /* the argument has a position */
    int entered = is_plain ? enter_unit(self, args, count) : 0;
    if (!entered) {
      PyObject* returned = PyObject_Vectorcall(self->object[BEFORE], args, nargsf, names);
      if (returned)
        Py_SETREF(state, returned);
      else
        entered = -1;
    }
    if (entered < 0 && !note_error(note, label)) goto fail;
  }
  if (is_timed && sample(self, began, 1) < 0) goto fail;
  result = PyObject_Vectorcall(self->original, args, nargsf, names);
  if (self->object[AFTER] != Py_None && state != skip) {
    PyObject *type, *value, *trace, *few[10], **all = few;
    PyErr_Fetch(&type, &value, &trace);
    began = get_slot(context, of_context[TIMING]) == Py_True ? now_ns() - CONTEXT(self, SPENT_NS) : 0;
    if (count > 8) all = PyMem_Malloc((count + 2) * sizeof(PyObject*));
    if (all) {
      all[0] = state;
      all[1] = result ? result : raised;
      for (Py_ssize_t i = 0; i < count; i++)
        all[2 + i] = args[i];
      PyObject* done = PyObject_Vectorcall(self->object[AFTER], all, count + 2, NULL);
      if (all != few) PyMem_Free(all);
      int is_noted = done ? 1 : note_error(note, label);
      Py_XDECREF(done);
      if (!is_noted || (began && sample(self, began, 0) < 0)) {
        /* as of a `finally`: this error takes the place of the function's own
         */
        Py_CLEAR(result);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        goto fail;
      }
    }
    PyErr_Restore(type, value, trace);
  }
fail:
  if (unit) set_slot(context, of_context[UNIT], unit);
  if (engine) set_slot(context, of_context[ENGINE], engine);
  Py_DECREF(state);
  return result;
}

static PyObject* wrapped_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return new_hook(type, args, call_wrapped, UNITS + 1, 4);
}

static PyTypeObject WrappedType = HOOK_TYPE("Wrapped", wrapped_new, "A function with its hooks.");

/* ---- work of the agent whose time is accounted: HookContext.timed
 * --------------------------------------------------------------------- */

static PyObject* call_timed(PyObject* hook, PyObject* const* args, size_t nargsf, PyObject* names) {
  Hook* self = (Hook*)hook;
  int64_t began = now_ns() - CONTEXT(self, SPENT_NS);
  PyObject* result = PyObject_Vectorcall(self->original, args, nargsf, names);
  if (set_int(self->context, of_context[SPENT_NS], now_ns() - began) < 0) Py_CLEAR(result);
  return result;
}

static PyObject* timed_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return new_hook(type, args, call_timed, 0, 0);
}

static PyTypeObject TimedType = HOOK_TYPE("Timed", timed_new, "A function whose time is accounted.");

/* ---- a collective is issued: c10d.Collectives._issue_hook
 * ---------------------------------------- */

enum {
  GROUPS,
  OPEN,
  NAME,
  DTYPES,
  TENSOR,
  TIMED,
  CAPTURES,
  DEVICE_ISSUED,
  ENDED,
  KEEP,
  CALL_BACK,
  GUARD,
  COUNT
};
enum { POSITION, ISSUED_WORD, OP_WORD, ASYNC_WORD, FLAGS };
enum { PER_RANK = 1, ASKS = 2, CALLS_BACK = 4 };
enum { E_WORD, E_PLACE, E_NBYTES, E_ISSUED_NS, E_SEQUENCE, E_END, E_EVENT, E_HELD_NS, E_FIELDS };

/* The group's state where this call is of the common kind; NULL where the
 * Python function has to look. */
static PyObject* common_group(Hook* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (names || count < 2 || count < self->number[POSITION] + 2) return NULL;
  unsigned long caller = PyThread_get_thread_ident();
  if ((unsigned long)CONTEXT(self, THREAD) != caller &&
      (unsigned long)CONTEXT(self, BACKWARD_THREAD) != caller)
    return NULL;
  PyObject* key = PyLong_FromVoidPtr(args[0]);
  if (!key) return NULL;
  PyObject* group = PyDict_GetItemWithError(self->object[GROUPS], key);
  Py_DECREF(key);
  if (!group || (PyObject*)Py_TYPE(group) != group_type) return NULL;
  if (get_slot(group, of_group[COALESCING]) != Py_None) return NULL;
  PyObject* even = get_slot(group, of_group[EVEN]);
  return even && PySet_Contains(even, self->object[NAME]) == 1 ? group : NULL;
}

/* The tensor with its bytes and its dtype's number; NULL where the payload is not one tensor.
 * A borrowed reference. */
static PyObject* one_tensor(Hook* self, PyObject* payload, long long* nbytes, long long* dtype) {
  if (PyList_CheckExact(payload) && PyList_GET_SIZE(payload) == 1) payload = PyList_GET_ITEM(payload, 0);
  if ((PyObject*)Py_TYPE(payload) != self->object[TENSOR]) return NULL;
  PyObject *size = PyObject_GetAttr(payload, str_nbytes), *type = PyObject_GetAttr(payload, str_dtype);
  PyObject* code = type ? PyDict_GetItemWithError(self->object[DTYPES], type) : NULL;
  int is_known = size && code;
  if (is_known) {
    *nbytes = PyLong_AsLongLong(size);
    *dtype = PyLong_AsLongLong(code);
  }
  Py_XDECREF(size);
  Py_XDECREF(type);
  return is_known ? payload : NULL;
}

/* Whether the options, the newest argument, make the call asynchronous; -1
 * where they do not say. */
static int asks_async(PyObject* options) {
  PyObject* answer = PyObject_GetAttr(options, str_async);
  if (!answer) {
    PyErr_Clear();
    return -1;
  }
  int truth = answer == Py_None ? -1 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth;
}

static int is_on_device(Hook* self, PyObject* tensor) {
  PyObject* device = PyObject_GetAttr(tensor, str_device);
  PyObject* type = device ? PyObject_GetAttr(device, str_type) : NULL;
  int same = type ? PyObject_RichCompareBool(type, self->object[TIMED], Py_EQ) : -1;
  Py_XDECREF(device);
  Py_XDECREF(type);
  return same;
}

/* Calls one of the Python functions. 0: it ended in Ctrl-C, which belongs to
 * the user. */
static int help(Hook* self, int function, PyObject* first, PyObject* second) {
  PyObject* done = PyObject_CallFunctionObjArgs(self->object[function], first, second, NULL);
  Py_XDECREF(done);
  return done || note_error(self->object[GUARD], self->object[NAME]);
}

/* Keeps *entry* until *work* is waited for. 0 as of help(). */
static int keep_open(Hook* self, PyObject* work, PyObject* entry) {
  PyObject* key = PyLong_FromVoidPtr(work);
  PyObject* kept = key ? PyDict_SetDefault(self->object[OPEN], key, entry) : NULL;
  int is_whole = 1;
  if (kept && kept != entry) { /* of a work that is gone */
    Py_INCREF(kept);
    is_whole = help(self, KEEP, kept, NULL);
    Py_DECREF(kept);
    if (is_whole) is_whole = PyDict_SetItem(self->object[OPEN], key, entry) == 0;
  } else if (!kept)
    is_whole = note_error(self->object[GUARD], self->object[NAME]);
  Py_XDECREF(key);
  return is_whole;
}

/* The call of a control step, which is counted and not timed. */
static PyObject* count_issue(Hook* self, PyObject* const* args, size_t nargsf, PyObject* group,
                             long long nbytes, long long dtype) {
  int is_whole = set_int(group, of_group[ISSUED], get_int(group, of_group[ISSUED]) + 1) == 0;
  if (is_whole) {
    PyObject *number = PyLong_FromLongLong(nbytes), *code = PyLong_FromLongLong(dtype);
    PyObject* id = get_slot(group, of_group[GROUP_ID]);
    PyObject* done = number && code
                         ? PyObject_CallFunctionObjArgs(self->object[COUNT], id, number, code, NULL)
                         : NULL;
    is_whole = done || note_error(self->object[GUARD], self->object[NAME]);
    Py_XDECREF(done);
    Py_XDECREF(number);
    Py_XDECREF(code);
  }
  PyObject* work = is_whole ? PyObject_Vectorcall(self->original, args, nargsf, NULL) : NULL;
  if (!work || work == Py_None) return work;
  /* A deleted work with a record may have this address: the wait for this one must not end it */
  PyObject* key = PyLong_FromVoidPtr(work);
  PyObject* kept = key ? PyDict_GetItemWithError(self->object[OPEN], key) : NULL;
  if (kept) {
    Py_INCREF(kept);
    is_whole = PyDict_DelItem(self->object[OPEN], key) == 0 && help(self, KEEP, kept, NULL);
    Py_DECREF(kept);
  } else if (PyErr_Occurred())
    is_whole = note_error(self->object[GUARD], self->object[NAME]);
  Py_XDECREF(key);
  if (!is_whole) Py_CLEAR(work);
  return work;
}

static int is_on_host(PyObject* tensor) {
  PyObject* is_cpu = PyObject_GetAttr(tensor, str_is_cpu);
  if (!is_cpu) PyErr_Clear();
  Py_XDECREF(is_cpu);
  return is_cpu == Py_True;
}

static PyObject* call_issue(PyObject* hook, PyObject* const* args, size_t nargsf, PyObject* names) {
  Hook* self = (Hook*)hook;
  long long mode = CONTEXT(self, MODE);
  if (!mode) return PyObject_Vectorcall(self->original, args, nargsf, names);
  long long nbytes = 0, dtype = 0;
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  PyObject* group = common_group(self, args, count, names);
  PyObject* payload = group ? one_tensor(self, args[self->number[POSITION] + 1], &nbytes, &dtype) : NULL;
  int on_device = payload ? get_slot(group, of_group[ON_DEVICE]) == Py_True : 0;
  int is_timed = on_device ? is_on_device(self, payload) : 0;
  if (is_timed > 0) {
    PyObject* answer = PyObject_CallNoArgs(self->object[CAPTURES]);
    if (!answer || answer != Py_False) payload = NULL;
    Py_XDECREF(answer);
  }
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* Ctrl-C */
  if (!payload || is_timed < 0 || (mode == 1 && on_device)) {
    PyErr_Clear();
    return PyObject_Vectorcall(self->slow, args, nargsf, names);
  }
  int flags = (int)self->number[FLAGS];
  if (flags & PER_RANK) nbytes *= get_int(group, of_group[SIZE]);
  if (mode == 1) return count_issue(self, args, nargsf, group, nbytes, dtype);
  Py_INCREF(group); /* the call may destroy it */
  long long issued = get_int(group, of_group[ISSUED]) + 1;
  long long sequence = issued - get_int(group, of_group[POINT_TO_POINT]);
  uint32_t at = (uint32_t)(get_int(group, of_group[GROUP_ID]) | CONTEXT(self, UNIT));
  uint32_t word = (uint32_t)CONTEXT(self, HEAD_WORD);
  int is_async = flags & ASKS ? asks_async(args[count - 1]) : -1;
  if (is_async > 0) word |= (uint32_t)self->number[ASYNC_WORD];
  int64_t started = now_ns();
  put(self->recorder, started, (uint32_t)self->number[ISSUED_WORD] | word, at, nbytes, sequence, dtype,
      CONTEXT(self, ENGINE));
  word |= (uint32_t)self->number[OP_WORD];
  PyObject *work = NULL, *entry;
  if (is_async == 0 && !is_timed)
    entry = Py_BuildValue("(IILLL)", word, at, nbytes, (long long)started, sequence);
  else /* -1: a synchronous one, which blocks to its end */
    entry = Py_BuildValue("[IILLLiOi]", word, at, nbytes, (long long)started, sequence, 0, Py_None,
                          is_async == 0 ? -1 : 0);
  if (!entry || set_int(group, of_group[ISSUED], issued) < 0) goto done;
  if (is_timed && !help(self, DEVICE_ISSUED, entry, NULL)) goto done;
  /* Before the call: another thread may take the payload out of its list meanwhile */
  int calls_back = is_async && !is_timed && flags & CALLS_BACK && is_on_host(payload);
  work = PyObject_Vectorcall(self->original, args, nargsf, names);
  if (!work || work == Py_None) { /* it failed, or has ended */
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (help(self, ENDED, entry, work ? Py_False : Py_True))
      PyErr_Restore(type, value, trace);
    else {
      Py_XDECREF(type);
      Py_XDECREF(value);
      Py_XDECREF(trace);
      Py_CLEAR(work);
    }
    goto done;
  }
  if ((is_timed || is_async) && (is_timed || PyList_GET_ITEM(entry, E_EVENT) == Py_None)) {
    PyObject* held = PyLong_FromLongLong(now_ns() - started);
    if (held) PyList_SetItem(entry, E_HELD_NS, held);
  }
  int is_whole = keep_open(self, work, entry);
  if (is_whole && calls_back) is_whole = help(self, CALL_BACK, work, entry);
  if (!is_whole) Py_CLEAR(work);
done:
  Py_XDECREF(entry);
  Py_DECREF(group);
  return work;
}

static PyObject* issue_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return new_hook(type, args, call_issue, COUNT + 1, 5);
}

static PyTypeObject IssueType = HOOK_TYPE("Issue", issue_new, "A method that issues a collective.");

/* ---- a collective is waited for: c10d.Collectives._wait_hook
 * ------------------------------------- */

enum { OPEN_WORKS, WAITED_FOR };
enum { DONE_WORD, FAILED_WORD, KNOWN_WORD, BLOCKED_NS };

static inline long long field(PyObject* const* fields, int i) { return PyLong_AsLongLong(fields[i]); }

static PyObject* call_wait(PyObject* hook, PyObject* const* args, size_t nargsf, PyObject* names) {
  Hook* self = (Hook*)hook;
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (!CONTEXT(self, MODE) || !count) return PyObject_Vectorcall(self->original, args, nargsf, names);
  PyObject *key = PyLong_FromVoidPtr(args[0]), *fields[E_FIELDS];
  PyObject* entry = key ? PyDict_GetItemWithError(self->object[OPEN_WORKS], key) : NULL;
  int is_tuple = entry && PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == E_END;
  int is_list = entry && PyList_CheckExact(entry) && PyList_GET_SIZE(entry) == E_FIELDS &&
                PyLong_CheckExact(PyList_GET_ITEM(entry, E_WORD)) &&
                PyList_GET_ITEM(entry, E_EVENT) == Py_None;
  if (!is_tuple && !is_list) {
    Py_XDECREF(key);
    PyErr_Clear();
    PyObject* function = entry ? self->slow : self->original;
    return PyObject_Vectorcall(function, args, nargsf, names);
  }
  Py_INCREF(entry);
  PyDict_DelItem(self->object[OPEN_WORKS], key);
  Py_DECREF(key);
  int64_t reached = is_list ? now_ns() : 0;
  PyObject *result = PyObject_Vectorcall(self->original, args, nargsf, names), *type, *value, *trace;
  int64_t left = now_ns(), blocked;
  PyErr_Fetch(&type, &value, &trace);
  /* only now: a callback on another thread may have filled in the end meanwhile
   */
  for (int i = 0; i < (is_list ? E_FIELDS : E_END); i++)
    fields[i] = is_list ? PyList_GET_ITEM(entry, i) : PyTuple_GET_ITEM(entry, i);
  long long word = field(fields, E_WORD), at = field(fields, E_PLACE),
            issued = field(fields, E_ISSUED_NS);
  long long nbytes = field(fields, E_NBYTES), sequence = field(fields, E_SEQUENCE);
  uint32_t outcome = (uint32_t)self->number[result ? DONE_WORD : FAILED_WORD];
  if (is_tuple)
    blocked = left - issued;
  else {
    long long end = field(fields, E_END), held = field(fields, E_HELD_NS);
    if (end && end < left)
      left = end;
    else if (!end && left - reached < self->number[BLOCKED_NS])
      outcome ^= (uint32_t)self->number[KNOWN_WORD];
    blocked = held + (left > reached ? left - reached : 0);
    PyObject* ended = PyLong_FromLongLong(left);
    PyObject* kind = ended ? Py_BuildValue("(LL)", word, at) : NULL;
    if (ended) PyList_SetItem(entry, E_END, ended);
    if (kind) PySet_Add(self->object[WAITED_FOR], kind);
    Py_XDECREF(kind);
  }
  put(self->recorder, left, (uint32_t)word | outcome, (uint32_t)at, nbytes, issued, blocked, sequence);
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
  Py_DECREF(entry);
  return result;
}

static PyObject* wait_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return new_hook(type, args, call_wait, WAITED_FOR + 1, 4);
}

static PyTypeObject WaitType = HOOK_TYPE("Wait", wait_new, "A method that waits for a collective.");

/* ---- the module
 * ----------------------------------------------------------------------------------
 */

/* settle(context_type, skip, raised, kind_unit): before any hook is made. */
static PyObject* settle(PyObject* module, PyObject* args) {
  PyObject *type, *skip_mark, *raised_mark;
  if (!PyArg_ParseTuple(args, "OOOL", &type, &skip_mark, &raised_mark, &kind_unit)) return NULL;
  if (slots_of(type, context_names, of_context, CONTEXT_SLOTS) < 0) return NULL;
  Py_XSETREF(context_type, Py_NewRef(type));
  Py_XSETREF(skip, Py_NewRef(skip_mark));
  Py_XSETREF(raised, Py_NewRef(raised_mark));
  Py_RETURN_NONE;
}

/* settle_groups(group_type): before a hook of collectives is made. */
static PyObject* settle_groups(PyObject* module, PyObject* type) {
  if (slots_of(type, group_names, of_group, GROUP_SLOTS) < 0) return NULL;
  Py_XSETREF(group_type, Py_NewRef(type));
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"settle", settle, METH_VARARGS, "settle(context_type, skip, raised, kind_unit): once, and first."},
    {"settle_groups", settle_groups, METH_O, "settle_groups(group_type): once."},
    {NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "compiled_hooks",
                                        "The hot paths of the hooks in C.", -1, functions};

PyMODINIT_FUNC PyInit_compiled_hooks(void) {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return NULL;
  PyTypeObject* types[] = {&RecorderType, &TimedType, &WrappedType, &IssueType, &WaitType};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (PyModule_AddType(module, types[i]) < 0) return NULL;
  str_nbytes = PyUnicode_InternFromString("nbytes");
  str_dtype = PyUnicode_InternFromString("dtype");
  str_async = PyUnicode_InternFromString("asyncOp");
  str_device = PyUnicode_InternFromString("device");
  str_type = PyUnicode_InternFromString("type");
  str_is_cpu = PyUnicode_InternFromString("is_cpu");
  str_unit = PyUnicode_InternFromString("_zeromon_unit");
  return module;
}
