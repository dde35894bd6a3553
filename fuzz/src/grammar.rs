//! Command-line values: no parser panics, and every error points into the text.
#![no_main]

use libfuzzer_sys::fuzz_target;

// Includes the module instead of the crate, which would link the AWS SDK.
#[allow(dead_code, unused_imports, reason = "what is not fuzzed")]
#[path = "../../crates/zae-limiter-cli/src/grammar/mod.rs"]
mod grammar;

use grammar::Misread;

fn check<T>(text: &str, read: impl Fn(&str) -> Result<T, Misread>) {
    if let Err(misread) = read(text) {
        // Panics unless the range lies within the text, between characters.
        let _ = &text[misread.at()];
        assert!(!misread.to_string().is_empty());
    }
}

fuzz_target!(|text: &str| {
    check(text, grammar::limit);
    check(text, grammar::amount);
    check(text, grammar::adjustment);
    check(text, grammar::duration);
    check(text, grammar::moment);
    check(text, grammar::entity_id);
    check(text, grammar::resource_or_default);
    check(text, grammar::limit_name);
    check(text, grammar::namespace_name);
    check(text, grammar::namespace_id);
    check(text, grammar::stack_name);
    check(text, grammar::store_url);
    check(text, grammar::key_value);
});
