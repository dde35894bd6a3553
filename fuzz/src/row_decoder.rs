//! Any bytes in a bucket's row decode to a bucket state or an error, never a panic.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| zae_limiter_sqlite::fuzz_decode(bytes));
