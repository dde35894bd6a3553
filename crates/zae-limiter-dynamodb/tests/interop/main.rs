//! Beside the Python client: both on one table, one budget.
//!
//! ```text
//! cargo build --release --manifest-path local/Cargo.toml
//! eval "$(crates/zae-limiter-dynamodb/tests/interop/venvs)"
//! cargo test -p zae-limiter-dynamodb --features interop-tests --test interop
//! ```
//!
//! Every case runs beside each release of it, on a table that we have created and on one that they
//! have. Time is the test's, for both. What is asserted is what both promise; where Python goes its
//! own way, the case says so.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what is wrong by panicking")]

mod both;
mod buckets;
mod exact;
mod python;
mod records;
#[path = "../endpoint/server.rs"]
mod server;

/// A test of each case for each release and kind of table.
macro_rules! cases {
    ($($module:ident: $($case:ident)*;)*) => {
        cases!(@ v0_10_3 V0_10_3 Ours $($module: $($case)*;)*);
        cases!(@ v0_17_0 V0_17_0 Ours $($module: $($case)*;)*);
        cases!(@ v0_10_3_own_table V0_10_3 Theirs $($module: $($case)*;)*);
        cases!(@ v0_17_0_own_table V0_17_0 Theirs $($module: $($case)*;)*);
    };
    (@ $name:ident $release:ident $kind:ident $($module:ident: $($case:ident)*;)*) => {
        mod $name {
            use crate::both::{Both, Kind};
            use crate::python::Release;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let name = stringify!($case);
                    let both = Both::on(Release::$release, Kind::$kind, name).await;
                    crate::$module::$case(both).await;
                }
            )*)*
        }
    };
}

cases! {
    records:
        entities_and_children
        limits_that_we_set
        limits_that_python_sets
        audit_events
        audit_retention
        namespaces;
    buckets:
        taken_in_turn
        refilled_over_time
        debt
        rollback
        several_limits
        cascade_of_ours
        cascade_of_python
        limits_change_under_buckets
        remainders
        lists_of_buckets
        deleted_under_a_lease
        limit_deleted_under_a_lease
        credits_above_the_ceiling
        many_writes_split_nothing;
    exact:
        three_processes_share_one_budget;
}
