// Functions of a library that is loaded at the first call, from the path in TESTBED_<NAME>, or else as the loader finds it.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tb {

class Library {
 public:
  Library(const char* variable, const char* name) {
    const char* given = getenv(variable);
    handle_ = dlopen(given ? given : name, RTLD_NOW | RTLD_GLOBAL);
    if (!handle_) throw std::runtime_error(std::string("testbed: ") + dlerror() + "; set " + variable + " to its path");
  }
  template <class F>
  F* find(const char* name) const {
    void* found = dlsym(handle_, name);
    if (!found) throw std::runtime_error(std::string("testbed: no function ") + name);
    return reinterpret_cast<F*>(found);
  }

 private:
  void* handle_;
};

}  // namespace tb
