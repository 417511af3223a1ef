#pragma once

// SHARDWRIGHT_CLONES before a function compiles it for several instruction sets; the loader picks
// the best one of the machine. Not under sanitizers: their run-time does not exist yet when the
// loader asks.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SHARDWRIGHT_HAS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SHARDWRIGHT_HAS_SANITIZER 1
#endif
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(SHARDWRIGHT_HAS_SANITIZER)
#define SHARDWRIGHT_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SHARDWRIGHT_CLONES
#endif
