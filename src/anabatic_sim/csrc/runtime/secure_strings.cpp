// The bounded string functions of libboundscheck that torchair takes from CANN's libraries (securec.h: -1 or an error code
// where the text does not fit, and the target is then empty).
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

extern "C" {

// At most `count` characters are written; a longer text is cut off, and -1 says so.
int vsnprintf_s(char* target, size_t size, size_t count, const char* format, va_list words) {
  if (target == nullptr || format == nullptr || size == 0) return -1;
  const size_t room = count < size ? count + 1 : size;
  const int length = vsnprintf(target, room, format, words);
  if (length >= 0 && static_cast<size_t>(length) < room) return length;
  if (length < 0 || room == size) target[0] = '\0';  // size is too small, not count
  return -1;
}

int snprintf_s(char* target, size_t size, size_t count, const char* format, ...) {
  va_list words;
  va_start(words, format);
  const int length = vsnprintf_s(target, size, count, format, words);
  va_end(words);
  return length;
}

int strcpy_s(char* target, size_t size, const char* source) {
  if (target == nullptr || size == 0) return EINVAL;
  if (source == nullptr || strlen(source) >= size) {
    target[0] = '\0';
    return source == nullptr ? EINVAL : ERANGE;
  }
  strcpy(target, source);
  return 0;
}

}  // extern "C"
