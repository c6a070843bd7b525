/* A host with two properties that a test can change, for LD_PRELOAD. In the directory $ODD_HOST:
 *   no-threads  while this file exists, cannot start a thread, as at the pids limit of a control group
 *   step        seconds by which the wall clock has been stepped
 * Both behave as the kernel does; a real control group or clock would need rights that a test does not have.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
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

static long step(void) {
  char path[4096];
  long seconds = 0;
  FILE *stepped = fopen(file(path, sizeof path, "step"), "r");
  if (!stepped) return 0;
  if (fscanf(stepped, "%ld", &seconds) != 1) seconds = 0;
  fclose(stepped);
  return seconds;
}

int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (id == CLOCK_REALTIME && result == 0) now->tv_sec += step();
  return result;
}

/* The next two functions do not use the function above, but the kernel's page. */
time_t time(time_t *place) {
  struct timespec now = {0, 0};
  clock_gettime(CLOCK_REALTIME, &now);
  if (place) *place = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact = {0, 0};
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

/* A deadline by the wall clock, which the kernel compares with the true clock. A deadline by the monotonic clock is
 * less than 1e9. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  struct timespec until = *deadline;
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  if (until.tv_sec > 1000000000) until.tv_sec -= step();
  return real(condition, mutex, &until);
}
