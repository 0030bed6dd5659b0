// Which line of Python asked for something. This library does not know Python: its C API is looked up in the process, and a
// program without it has no lines.
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "state.h"

namespace {

struct Api {
  int (*initialised)(void);
  int (*finalising)(void);  // null before 3.13, where it has another name
  void* (*this_thread)(void);
  int (*ensure)(void);
  void (*release)(int);
  int (*holds)(void);                 // this thread has Python's lock
  void* (*frame)(void*);              // of a thread's state; new reference
  void* (*back)(void*);               // new reference
  void* (*code)(void*);               // new reference
  int (*line)(void*);
  void* (*attribute)(void*, const char*);
  const char* (*text)(void*);
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
  find(api.holds, "PyGILState_Check", &api.whole);
  find(api.frame, "PyThreadState_GetFrame", &api.whole);
  find(api.back, "PyFrame_GetBack", &api.whole);
  find(api.code, "PyFrame_GetCode", &api.whole);
  find(api.line, "PyFrame_GetLineNumber", &api.whole);
  find(api.attribute, "PyObject_GetAttrString", &api.whole);
  find(api.text, "PyUnicode_AsUTF8", &api.whole);
  find(api.drop, "Py_DecRef", &api.whole);
  return api;
}

// torch's own files are never the cause.
bool of_torch(const char* file) {
  return file[0] == '<' || strstr(file, "-packages/torch/") != nullptr || strstr(file, "/torch_npu/") != nullptr;
}

std::string line_of(const Api& api, void* frame) {
  std::string innermost;
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

const Api& api() {
  static const Api found = load();
  return found;
}

// The frames of a thread; the caller has Python's lock.
std::string line_of_thread(void* thread) {
  void* frame = api().frame(thread);
  return frame != nullptr ? line_of(api(), frame) : "";  // gives the frame back
}

// Somebody who waits for Python's lock while holding one of torch_npu's could wait for ever: a thread of ours asks instead, and
// whoever needs the answer waits a moment at most.
constexpr auto kPatience = std::chrono::milliseconds(50);

struct Question {
  void* thread;
  std::string answer;
  bool answered = false, withdrawn = false;
};

struct Desk {
  std::mutex mutex;
  std::condition_variable asked, told;
  std::deque<std::shared_ptr<Question>> questions;
};

void answer_questions(Desk* desk) {
  std::unique_lock<std::mutex> lock(desk->mutex);
  for (;;) {
    desk->asked.wait(lock, [&] { return !desk->questions.empty(); });
    auto question = desk->questions.front();
    desk->questions.pop_front();
    lock.unlock();
    const int state = api().ensure();
    lock.lock();  // held while frames are read: a question that is withdrawn has a thread that runs on
    if (!question->withdrawn) question->answer = line_of_thread(question->thread);
    question->answered = true;
    desk->told.notify_all();
    lock.unlock();
    api().release(state);
    lock.lock();
  }
}

std::string ask(void* thread) {
  static Desk* const desk = [] {
    auto* made = new Desk;  // outlives the process's end
    std::thread(answer_questions, made).detach();
    return made;
  }();
  auto question = std::make_shared<Question>();
  question->thread = thread;
  std::unique_lock<std::mutex> lock(desk->mutex);
  desk->questions.push_back(question);
  desk->asked.notify_one();
  desk->told.wait_for(lock, kPatience, [&] { return question->answered; });
  question->withdrawn = !question->answered;
  return question->answer;
}

}  // namespace

namespace sim {

std::string python_line() {
  static const pid_t asker = getpid();
  if (!api().whole || getpid() != asker || api().initialised() == 0 || api().finalising() != 0) return "";
  void* thread = api().this_thread();
  if (thread == nullptr) return "";
  return api().holds() != 0 ? line_of_thread(thread) : ask(thread);
}

}  // namespace sim
