// Which line of Python asked for something. This library does not know Python: its C API is looked up in the process, and a
// program without it has no lines.
#include <dlfcn.h>
#include <string.h>

#include "state.h"

namespace {

struct Api {
  int (*initialised)(void);
  int (*finalising)(void);  // null before 3.13, where it has another name
  void* (*this_thread)(void);
  int (*ensure)(void);
  void (*release)(int);
  void* (*frame)(void);               // borrowed
  void* (*back)(void*);               // new reference
  void* (*code)(void*);               // new reference
  int (*line)(void*);
  void* (*attribute)(void*, const char*);
  const char* (*text)(void*);
  void (*keep)(void*);
  void (*drop)(void*);
  bool whole;
};

template <typename Function>
void find(Function& function, const char* name, bool* whole = nullptr) {
  function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  if (function == nullptr && whole != nullptr) *whole = false;
}

Api load() {
  Api api{};
  api.whole = true;
  find(api.initialised, "Py_IsInitialized", &api.whole);
  find(api.finalising, "Py_IsFinalizing");
  if (api.finalising == nullptr) find(api.finalising, "_Py_IsFinalizing", &api.whole);
  find(api.this_thread, "PyGILState_GetThisThreadState", &api.whole);
  find(api.ensure, "PyGILState_Ensure", &api.whole);
  find(api.release, "PyGILState_Release", &api.whole);
  find(api.frame, "PyEval_GetFrame", &api.whole);
  find(api.back, "PyFrame_GetBack", &api.whole);
  find(api.code, "PyFrame_GetCode", &api.whole);
  find(api.line, "PyFrame_GetLineNumber", &api.whole);
  find(api.attribute, "PyObject_GetAttrString", &api.whole);
  find(api.text, "PyUnicode_AsUTF8", &api.whole);
  find(api.keep, "Py_IncRef", &api.whole);
  find(api.drop, "Py_DecRef", &api.whole);
  return api;
}

// torch's own files are never the cause.
bool of_torch(const char* file) {
  return file[0] == '<' || strstr(file, "-packages/torch/") != nullptr || strstr(file, "/torch_npu/") != nullptr;
}

std::string line_of(const Api& api, void* frame) {
  std::string innermost;
  api.keep(frame);
  while (frame != nullptr) {
    void* code = api.code(frame);
    void* name = code != nullptr ? api.attribute(code, "co_filename") : nullptr;
    const char* file = name != nullptr ? api.text(name) : nullptr;
    std::string found = file != nullptr ? std::string(file) + ":" + std::to_string(api.line(frame)) : "";
    const bool done = file != nullptr && !of_torch(file);
    if (name != nullptr) api.drop(name);
    if (code != nullptr) api.drop(code);
    void* outer = done ? nullptr : api.back(frame);
    api.drop(frame);
    if (done) return found;
    if (innermost.empty()) innermost = found;
    frame = outer;
  }
  return innermost;
}

}  // namespace

namespace sim {

std::string python_line() {
  static const Api api = load();
  if (!api.whole || api.initialised() == 0 || api.finalising() != 0 || api.this_thread() == nullptr) return "";
  const int state = api.ensure();
  void* frame = api.frame();
  std::string found = frame != nullptr ? line_of(api, frame) : "";
  api.release(state);
  return found;
}

}  // namespace sim
