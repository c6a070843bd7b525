/* A host on which a test turns two screws, for LD_PRELOAD. In the directory $ODD_HOST:
 *   no-threads  while this file is there, no thread can be started, as at the pids limit of a control group
 *   step        seconds by which the wall clock has been stepped
 * Both are what the kernel would do; a control group or a clock of its own would need rights that a test has not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const char *file(char *path, size_t size, const char *name) {
  const char *directory = getenv("ODD_HOST");
  snprintf(path, size, "%s/%s", directory ? directory : "/nonexistent", name);
  return path;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
  static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
  char path[4096];
  if (access(file(path, sizeof path, "no-threads"), F_OK) == 0) return EAGAIN;
  if (!real) real = dlsym(RTLD_NEXT, "pthread_create");
  return real(thread, attributes, run, argument);
}

int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  char path[4096];
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (id != CLOCK_REALTIME || result != 0) return result;
  FILE *step = fopen(file(path, sizeof path, "step"), "r");
  if (step) {
    long seconds = 0;
    if (fscanf(step, "%ld", &seconds) == 1) now->tv_sec += seconds;
    fclose(step);
  }
  return result;
}
