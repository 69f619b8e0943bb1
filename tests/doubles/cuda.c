/* A test double of the CUDA driver (libcuda.so.1) for machines without a GPU. Device memory is host memory.
 *
 * Streams are what it is for: each is a thread with a queue, so work on two streams runs in any order that events allow, and
 * a dependency that is missing shows as wrong bytes. FAKECUDA_JITTER_US sleeps at random before an operation, up to so long.
 * Capture records operations and replays them on the streams where they were captured; streams that were not joined, and waits
 * for events from outside of a capture, are errors as they are in the driver. FAKECUDA_DEVICES (8) is how many devices
 * it has, FAKECUDA_FIRST (0) the first of its host's that this process sees.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, NOT_FOUND = 500, NOT_READY = 600,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 907 };

typedef struct Stream Stream;
typedef struct Graph Graph;
typedef struct Event {
  uint64_t recorded, done; /* generations */
  pthread_cond_t reached;  /* of zeros it is ready, as are those of streams */
  double at_s;
  Graph *capture; /* in which it was recorded last, and after how many operations of which stream */
  Stream *by;
  uint64_t by_seq;
} Event;
typedef enum { RUN, RECORD, WAIT } Kind;
typedef struct Op {
  Kind kind;
  void (*run)(void *);
  void *arg;
  int owned; /* arg is freed after it has run */
  Event *event;
  uint64_t generation;
  struct Op *next;
  Stream *stream; /* in a graph */
} Op;
struct Stream {
  pthread_t thread;
  pthread_cond_t given;
  Op *first, *last;
  uint64_t pushed, ran;
  int ending;
  Graph *capture;
  Stream *origin;
  uint64_t seq; /* operations captured */
  int joined;   /* what was captured is waited for by another stream */
  Stream *next;
};
struct Graph { Op *first, *last; Stream *origin; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER; /* of the host, which waits for anything */
static Stream *streams;
static Stream default_stream;
static int initialised, default_started;
static __thread void *current;

static double now_s(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static long option(const char *name, long otherwise) { const char *text = getenv(name); return text ? atol(text) : otherwise; }

static void *work(void *given) {
  Stream *s = given;
  long jitter = option("FAKECUDA_JITTER_US", 0);
  unsigned seed = (unsigned)(uintptr_t)s ^ (unsigned)getpid();
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!s->first && !s->ending) pthread_cond_wait(&s->given, &lock);
    if (!s->first) break;
    Op *op = s->first;
    if (op->kind == WAIT) while (op->event->done < op->generation) pthread_cond_wait(&op->event->reached, &lock);
    if (op->kind == RECORD && op->generation > op->event->done) {
      op->event->done = op->generation; op->event->at_s = now_s();
      pthread_cond_broadcast(&op->event->reached);
    }
    if (op->kind == RUN) {
      pthread_mutex_unlock(&lock);
      if (jitter) usleep(rand_r(&seed) % jitter);
      op->run(op->arg);
      if (op->owned) free(op->arg);
      pthread_mutex_lock(&lock);
    }
    s->first = op->next;
    if (!s->first) s->last = NULL;
    s->ran++;
    free(op);
    pthread_cond_broadcast(&moved);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static Stream *stream_of(Stream *s) { /* with the lock held */
  if (s) return s;
  if (!default_started) { default_started = 1; pthread_create(&default_stream.thread, NULL, work, &default_stream); }
  return &default_stream;
}

static void push(Stream *s, Op op) { /* with the lock held, outside of a capture */
  Op *o = malloc(sizeof *o);
  *o = op;
  o->next = NULL;
  if (s->last) s->last->next = o; else s->first = o;
  s->last = o;
  s->pushed++;
  pthread_cond_signal(&s->given);
}

static void put_in_graph(Stream *s, Op op) {
  Op *o = malloc(sizeof *o);
  *o = op;
  o->next = NULL;
  o->owned = 0;
  o->stream = s;
  if (s->capture->last) s->capture->last->next = o; else s->capture->first = o;
  s->capture->last = o;
  s->seq++;
  if (op.kind != RECORD) s->joined = 0;
}

static int enqueue(Stream *given, void (*run)(void *), void *arg, int owned) {
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(given);
  Op op = {.kind = RUN, .run = run, .arg = arg, .owned = owned};
  if (s->capture) put_in_graph(s, op); else push(s, op);
  pthread_mutex_unlock(&lock);
  return OK;
}

static void record(Stream *s, Event *e) { push(s, (Op){.kind = RECORD, .event = e, .generation = ++e->recorded}); }
static void wait_for(Stream *s, Event *e) { if (e->recorded) push(s, (Op){.kind = WAIT, .event = e, .generation = e->recorded}); }

/* Devices and contexts: a context is its device's number + 1. */
API int cuInit(unsigned flags) { (void)flags; initialised = 1; return option("FAKECUDA_DEVICES", 8) > 0 ? OK : 100; }
API int cuDriverGetVersion(int *version) { *version = (int)option("FAKECUDA_VERSION", 12090); return OK; }
API int cuDeviceGetCount(int *n) { *n = (int)option("FAKECUDA_DEVICES", 8); return initialised ? OK : NOT_INITIALIZED; }
API int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < option("FAKECUDA_DEVICES", 8) ? OK : INVALID_DEVICE; }
API int cuDeviceGetName(char *name, int n, int device) { snprintf(name, n, "CPU double %d", device); return OK; }
API int cuDeviceGetAttribute(int *value, int what, int device) { (void)device; *value = what == 16 ? 132 : 1; return OK; } /* multiprocessors */
API int cuDeviceGetUuid(char *out, int device) { memset(out, 0, 16); out[15] = (char)(device + option("FAKECUDA_FIRST", 0)); return OK; }
API int cuDeviceTotalMem(size_t *n, int device) { (void)device; *n = (size_t)64 << 30; return OK; }
API int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return OK; }
API int cuDevicePrimaryCtxRelease(int device) { (void)device; return OK; }
API int cuCtxSetCurrent(void *context) { current = context; return OK; }
API int cuCtxGetCurrent(void **context) { *context = current; return OK; }
API int cuCtxGetDevice(int *device) { *device = (int)(intptr_t)current - 1; return current ? OK : 201; }
API int cuGetErrorName(int code, const char **text) {
  *text = code == NOT_READY ? "CUDA_ERROR_NOT_READY" : code == CAPTURE_UNJOINED ? "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    : code == CAPTURE_ISOLATION ? "CUDA_ERROR_STREAM_CAPTURE_ISOLATION" : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
    : code ? "CUDA_ERROR" : "CUDA_SUCCESS";
  return OK;
}
API int cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }

/* Memory: untouched pages cost nothing. The size lies in a page before what is given. */
API int cuMemAlloc(uint64_t *out, size_t n) {
  if (!current) return 201;
  char *p = mmap(NULL, n + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return OUT_OF_MEMORY;
  *(size_t *)p = n + 4096;
  *out = (uint64_t)(p + 4096);
  return OK;
}
API int cuMemFree(uint64_t p) { if (p) munmap((char *)p - 4096, *(size_t *)((char *)p - 4096)); return OK; }
API int cuMemGetInfo(size_t *left, size_t *total) { *left = *total = (size_t)64 << 30; return OK; }

typedef struct { char *dst; const char *src; size_t n; } Copy;
static void copy(void *given) { Copy *c = given; memmove(c->dst, c->src, c->n); }
static int begin_copy(uint64_t dst, uint64_t src, size_t n, Stream *s) {
  Copy *c = malloc(sizeof *c);
  *c = (Copy){(char *)dst, (const char *)src, n};
  return enqueue(s, copy, c, 1);
}
API int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t n, Stream *s) { return begin_copy(dst, src, n, s); }
API int cuMemcpyDtoDAsync(uint64_t dst, uint64_t src, size_t n, Stream *s) { return begin_copy(dst, src, n, s); }
API int cuMemcpyHtoDAsync(uint64_t dst, const void *src, size_t n, Stream *s) { return begin_copy(dst, (uint64_t)src, n, s); }
API int cuMemcpyDtoHAsync(void *dst, uint64_t src, size_t n, Stream *s) { return begin_copy((uint64_t)dst, src, n, s); }

typedef struct { size_t x, y; unsigned type; const void *host; uint64_t device; void *array; size_t pitch; } Side2;
typedef struct { Side2 src, dst; size_t width, height; } Copy2;
static void copy2(void *given) {
  Copy2 *c = given;
  for (size_t y = 0; y < c->height; y++)
    memcpy((char *)c->dst.device + y * c->dst.pitch, (char *)c->src.device + y * c->src.pitch, c->width);
}
API int cuMemcpy2DAsync(const Copy2 *given, Stream *s) {
  if (given->src.type != 2 || given->dst.type != 2 || given->src.x || given->dst.x || given->src.y || given->dst.y) return INVALID_VALUE;
  if (given->src.pitch < given->width || given->dst.pitch < given->width) return INVALID_VALUE;
  Copy2 *c = malloc(sizeof *c);
  *c = *given;
  return enqueue(s, copy2, c, 1);
}
typedef struct { size_t x, y, z, lod; unsigned type; const void *host; uint64_t device; void *array, *reserved; size_t pitch, height; } Side3;
typedef struct { Side3 src, dst; size_t width, height, depth; } Copy3;
static void copy3(void *given) {
  Copy3 *c = given;
  for (size_t z = 0; z < c->depth; z++)
    for (size_t y = 0; y < c->height; y++)
      memcpy((char *)c->dst.device + (z * c->dst.height + y) * c->dst.pitch,
             (char *)c->src.device + (z * c->src.height + y) * c->src.pitch, c->width);
}
API int cuMemcpy3DAsync(const Copy3 *given, Stream *s) {
  if (given->src.type != 2 || given->dst.type != 2) return INVALID_VALUE;
  if (given->src.pitch < given->width || given->dst.pitch < given->width) return INVALID_VALUE;
  if (given->src.height < given->height || given->dst.height < given->height) return INVALID_VALUE;
  Copy3 *c = malloc(sizeof *c);
  *c = *given;
  return enqueue(s, copy3, c, 1);
}

/* Streams and events. */
API int cuStreamCreate(Stream **out, unsigned flags) {
  (void)flags;
  if (!current) return 201;
  Stream *s = calloc(1, sizeof *s);
  pthread_mutex_lock(&lock);
  s->next = streams;
  streams = s;
  pthread_mutex_unlock(&lock);
  pthread_create(&s->thread, NULL, work, s);
  *out = s;
  return OK;
}
API int cuStreamCreateWithPriority(Stream **out, unsigned flags, int priority) { (void)priority; return cuStreamCreate(out, flags); }
API int cuStreamDestroy(Stream *s) {
  pthread_mutex_lock(&lock);
  s->ending = 1;
  pthread_cond_signal(&s->given);
  pthread_mutex_unlock(&lock);
  return OK; /* its thread ends when it has nothing more to do, and the structure stays */
}
API int cuStreamQuery(Stream *given) {
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(given);
  int code = s->capture ? CAPTURE_UNSUPPORTED : s->ran == s->pushed ? OK : NOT_READY;
  pthread_mutex_unlock(&lock);
  return code;
}
API int cuStreamSynchronize(Stream *given) {
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(given);
  uint64_t until = s->pushed;
  while (s->ran < until) pthread_cond_wait(&moved, &lock);
  pthread_mutex_unlock(&lock);
  return s->capture ? CAPTURE_UNSUPPORTED : OK;
}
API int cuEventCreate(Event **out, unsigned flags) { (void)flags; *out = calloc(1, sizeof **out); return OK; }
API int cuEventDestroy(Event *e) { (void)e; return OK; }
API int cuEventRecord(Event *e, Stream *given) {
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(given);
  e->capture = s->capture;
  e->by = s;
  if (s->capture) { put_in_graph(s, (Op){.kind = RECORD, .event = e}); e->by_seq = s->seq; } else record(s, e);
  pthread_mutex_unlock(&lock);
  return OK;
}
API int cuEventQuery(Event *e) {
  pthread_mutex_lock(&lock);
  int code = e->capture ? CAPTURE_UNSUPPORTED : e->done >= e->recorded ? OK : NOT_READY;
  pthread_mutex_unlock(&lock);
  return code;
}
API int cuEventSynchronize(Event *e) {
  pthread_mutex_lock(&lock);
  while (e->done < e->recorded) pthread_cond_wait(&moved, &lock);
  pthread_mutex_unlock(&lock);
  return OK;
}
API int cuEventElapsedTime(float *ms, Event *a, Event *b) {
  if (!a->recorded || !b->recorded) return 400;
  *ms = (float)(1e3 * (b->at_s - a->at_s));
  return cuEventQuery(a) ? cuEventQuery(a) : cuEventQuery(b);
}
API int cuStreamWaitEvent(Stream *given, Event *e, unsigned flags) {
  (void)flags;
  int code = OK;
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(given);
  if (e->capture) {
    if (!s->capture) { s->capture = e->capture; s->origin = e->capture->origin; s->seq = 0; s->joined = 0; }
    if (s->capture != e->capture) code = CAPTURE_ISOLATION;
    else { put_in_graph(s, (Op){.kind = WAIT, .event = e}); if (e->by != s && e->by_seq == e->by->seq) e->by->joined = 1; }
  } else if (s->capture) code = CAPTURE_ISOLATION;
  else wait_for(s, e);
  pthread_mutex_unlock(&lock);
  return code;
}
API int cuLaunchHostFunc(Stream *s, void (*run)(void *), void *arg) { return enqueue(s, run, arg, 0); }

/* Capture. */
API int cuStreamBeginCapture(Stream *s, int mode) {
  (void)mode;
  if (!s || s->capture) return CAPTURE_UNSUPPORTED;
  pthread_mutex_lock(&lock);
  s->capture = calloc(1, sizeof *s->capture);
  s->capture->origin = s->origin = s;
  s->seq = 0;
  pthread_mutex_unlock(&lock);
  return OK;
}
API int cuStreamEndCapture(Stream *s, Graph **out) {
  int code = s->capture ? OK : INVALID_VALUE;
  pthread_mutex_lock(&lock);
  Graph *g = s->capture;
  for (Stream *other = streams; g && other; other = other->next)
    if (other->capture == g) { if (other != s && !other->joined) code = CAPTURE_UNJOINED; other->capture = NULL; }
  for (Op *o = g ? g->first : NULL; o; o = o->next) if (o->event) o->event->capture = NULL;
  pthread_mutex_unlock(&lock);
  *out = code ? NULL : g;
  return code;
}
API int cuGraphInstantiateWithFlags(Graph **out, Graph *g, unsigned long long flags) { (void)flags; *out = g; return OK; }
API int cuGraphDestroy(Graph *g) { (void)g; return OK; }
API int cuGraphExecDestroy(Graph *g) { (void)g; return OK; }
API int cuGraphGetNodes(Graph *g, void **nodes, size_t *n) { size_t k = 0; for (Op *o = g->first; o; o = o->next) k += o->kind == RUN; *n = k; return nodes ? INVALID_VALUE : OK; }
API int cuGraphLaunch(Graph *g, Stream *given) {
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(given);
  Event *fork = calloc(1, sizeof *fork);
  record(s, fork);
  for (Stream *other = streams; other; other = other->next) {
    int used = 0;
    for (Op *o = g->first; o && !used; o = o->next) used = o->stream == other;
    if (used && other != s) wait_for(other, fork);
  }
  for (Op *o = g->first; o; o = o->next) {
    if (o->kind == RECORD) record(o->stream, o->event);
    else if (o->kind == WAIT) wait_for(o->stream, o->event);
    else push(o->stream, *o);
  }
  Event *end = calloc(1, sizeof *end);
  record(g->origin, end);
  wait_for(s, end);
  pthread_mutex_unlock(&lock);
  return OK;
}

/* As in the driver, a plain name is also that of a later version. */
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
  char later[128];
  (void)version; (void)flags;
  snprintf(later, sizeof later, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, later);
  if (found) *found = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
