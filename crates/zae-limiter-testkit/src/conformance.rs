//! The conformance suite: the contract of [`Store`](zae_limiter_core::Store) as executable checks.
//!
//! The modules in `checks` contain the checks. A check is an async function that gets a fresh,
//! empty store and panics if the store breaks the rule that the function's name states. The macros
//! here turn the checks into tests, one per check. Each test makes its own store and runtime.
//!
//! - [`conformance_tests!`](crate::conformance_tests) is for every store;
//! - [`usage_conformance_tests!`](crate::usage_conformance_tests) is for stores that keep usage
//!   records themselves;
//! - [`one_step_conformance_tests!`](crate::one_step_conformance_tests) is for stores that change
//!   several buckets in one step;
//! - [`bucket_conformance_tests!`](crate::bucket_conformance_tests) has only the checks that need
//!   no more than the permission to acquire.
//!
//! A new check must be listed in one of the macros. A test at the end of this file ensures that.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use zae_limiter_core::Store;

/// A fresh, empty store, and a guard that must outlive it, such as a temporary directory. It can be
/// converted from an `Arc` of a store, or from a pair of that and the guard.
pub struct Fixture {
    store: Arc<dyn Store>,
    // Only dropped, after the store.
    _guard: Box<dyn Any + Send>,
}

impl Fixture {
    /// A store without a guard.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::guarded(store, ())
    }

    /// A store, and a guard that is dropped after it.
    pub fn guarded(store: Arc<dyn Store>, guard: impl Any + Send) -> Self {
        Self { store, _guard: Box::new(guard) }
    }
}

impl fmt::Debug for Fixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fixture").field("store", &self.store).finish_non_exhaustive()
    }
}

impl<S: Store> From<Arc<S>> for Fixture {
    fn from(store: Arc<S>) -> Self {
        Self::new(store)
    }
}

impl From<Arc<dyn Store>> for Fixture {
    fn from(store: Arc<dyn Store>) -> Self {
        Self::new(store)
    }
}

impl<S: Store, G: Any + Send> From<(Arc<S>, G)> for Fixture {
    fn from((store, guard): (Arc<S>, G)) -> Self {
        Self::guarded(store, guard)
    }
}

impl<G: Any + Send> From<(Arc<dyn Store>, G)> for Fixture {
    fn from((store, guard): (Arc<dyn Store>, G)) -> Self {
        Self::guarded(store, guard)
    }
}

/// Runs one check on a fresh store, on the current thread.
pub fn run<Made, Check>(make: impl Fn() -> Made, check: impl FnOnce(Arc<dyn Store>) -> Check)
where
    Made: Future<Output: Into<Fixture>>,
    Check: Future<Output = ()>,
{
    run_on(&Builder::new_current_thread().enable_all().build().expect("a runtime"), make, check);
}

/// Runs one check on a fresh store, on several threads.
pub fn run_on_threads<Made, Check>(
    make: impl Fn() -> Made,
    check: impl FnOnce(Arc<dyn Store>) -> Check,
) where
    Made: Future<Output: Into<Fixture>>,
    Check: Future<Output = ()>,
{
    let threads = Builder::new_multi_thread().worker_threads(4).enable_all().build();
    run_on(&threads.expect("a runtime"), make, check);
}

fn run_on<Made, Check>(
    runtime: &Runtime,
    make: impl Fn() -> Made,
    check: impl FnOnce(Arc<dyn Store>) -> Check,
) where
    Made: Future<Output: Into<Fixture>>,
    Check: Future<Output = ()>,
{
    runtime.block_on(async {
        // The store is made, used and dropped within the runtime, because it may spawn tasks on it.
        let fixture: Fixture = make().await.into();
        check(Arc::clone(&fixture.store)).await;
        drop(fixture);
    });
}

/// Tests the whole contract of [`Store`](zae_limiter_core::Store), except usage records that the
/// store books itself.
///
/// The first argument is the name of the module for the tests. The second is an async function or
/// closure without arguments. It returns a fresh, empty store: an `Arc` of it, a pair of that and a
/// guard that must outlive it, or a [`Fixture`]. Each test calls it once, on its own tokio runtime.
///
/// ```
/// # use std::sync::Arc;
/// # use zae_limiter_core::Store;
/// # fn open() -> Arc<dyn Store> { unimplemented!() }
/// zae_limiter_testkit::conformance_tests!(my_store, || async { open() });
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($module:ident, $make:expr) => {
        $crate::bucket_conformance_tests! { $module, $make,
            random: run {
                a_random_run_equals_the_oracle_while_rates_change,
                a_random_run_equals_the_oracle_while_limits_come_and_go,
            }
            records: run {
                records_are_read_in_the_order_of_the_keys,
                bucket_keys_give_no_record,
                a_put_replaces_the_whole_record,
                each_precondition_holds_when_it_should,
                a_conflict_names_its_place_and_changes_nothing,
                a_batch_of_all_kinds_of_writes_is_made_together,
                a_full_batch_is_written_and_read,
                an_empty_batch_is_no_error,
                deleting_ignores_missing_keys,
                a_deleted_bucket_is_full_again,
                keys_of_different_kinds_never_collide,
                a_dropped_batch_is_written_whole_or_not_at_all,
            }
            write_races: run_on_threads {
                one_of_many_conditional_writes_wins,
                one_of_many_writes_of_a_version_wins,
            }
            round_trips: run {
                entities_come_back_as_they_were_put,
                configs_come_back_as_they_were_put,
                audit_events_come_back_as_they_were_put,
                usage_comes_back_as_it_was_put,
                namespaces_come_back_as_they_were_put,
            }
            lists: run {
                children_are_listed_by_id,
                a_child_that_moves_is_listed_under_its_new_parent,
                entity_configs_are_listed_by_entity,
                audit_events_are_listed_newest_first,
                usage_of_an_entity_is_listed_by_resource_and_start,
                usage_of_a_resource_is_listed_by_start_and_entity,
                namespaces_are_listed_by_id,
                buckets_of_an_entity_are_listed_by_resource,
                buckets_on_a_resource_are_listed_by_entity,
                resources_are_listed_by_name_and_once,
                what_is_deleted_is_no_longer_listed,
                an_empty_store_lists_nothing,
            }
            paging: run {
                records_that_stay_are_listed_once_while_others_come_and_go,
                buckets_that_stay_are_listed_once_while_others_come_and_go,
                keys_that_stay_are_listed_once_while_others_come_and_go,
                resources_that_stay_are_listed_once_while_others_come_and_go,
                a_garbled_cursor_is_an_error,
            }
            scopes: run {
                the_scope_of_an_entity_is_all_that_belongs_to_it,
                the_scope_of_a_namespace_is_all_within_it,
                namespaces_do_not_see_each_other,
                deleting_an_entity_page_by_page_leaves_nothing_of_it,
                five_thousand_items_are_purged_in_pages,
            }
        }
    };
}

/// Tests only the contract of buckets, which is all that a caller with the permission to acquire
/// needs. The two random runs, of thousands of calls each, are left out. A few checks also list
/// buckets or write records: with [`Split`](crate::Split) an administrator's store does that. The
/// arguments are those of [`conformance_tests!`].
///
/// ```
/// # use std::sync::Arc;
/// # use zae_limiter_core::Store;
/// # fn open() -> Arc<dyn Store> { unimplemented!() }
/// zae_limiter_testkit::bucket_conformance_tests!(my_store_buckets, || async { open() });
/// ```
#[macro_export]
macro_rules! bucket_conformance_tests {
    ($module:ident, $make:expr $(, $($more:tt)+)?) => {
        $crate::__tests! { $module, $make,
            admission: run {
                an_absent_bucket_is_full,
                what_is_left_is_reported_in_the_order_of_the_takes,
                nothing_is_taken_when_one_limit_refuses,
                nothing_is_taken_when_one_leg_refuses,
                a_chain_of_eight_is_taken_together,
                limits_that_are_not_requested_are_not_checked,
                an_amount_of_zero_checks_nothing_even_in_debt,
                the_largest_amount_can_be_taken,
                buckets_differ_by_namespace_entity_and_resource,
                acquire_now_gives_the_reply_of_acquire,
                take_now_takes_what_acquire_takes_or_nothing,
            }
            refusal: run {
                a_refusal_lists_every_requested_limit,
                a_wait_is_exact_to_the_millisecond,
                a_wait_of_a_clock_that_lags_counts_from_the_last_refill,
                a_refused_plan_changes_no_balance,
                a_refused_plan_refills_nothing,
                a_refused_plan_does_not_make_the_bucket_follow,
                a_refused_plan_renews_no_lifetime,
            }
            refill: run {
                a_slow_limit_earns_beside_a_busy_one,
                an_idle_bucket_fills_to_its_capacity_and_no_higher,
                a_clock_that_runs_back_refills_nothing,
                the_ends_of_time_do_no_harm,
            }
            following: run {
                a_lower_capacity_cuts_the_balance,
                a_higher_capacity_grants_nothing_at_once,
                a_changed_rate_earns_from_then_on,
                a_new_limit_starts_full,
                a_limit_missing_from_the_plan_keeps_its_balance,
                cells_count_in_the_limits_of_the_plan,
                reconfigure_gives_exactly_the_limits,
                reconfigure_leaves_an_absent_bucket_absent,
                reconfigure_leaves_an_expired_bucket_absent,
            }
            settling: run {
                settling_takes_into_debt_and_the_debt_is_repaid,
                settling_refunds_what_was_taken,
                refunds_stop_at_the_capacity,
                a_settlement_refills_first,
                differences_of_several_limits_and_buckets_all_count,
                settlements_of_one_bucket_in_one_call_all_count,
                a_charge_on_an_absent_bucket_leaves_full_less_the_charge,
                a_charge_on_an_absent_bucket_may_leave_debt,
                a_charge_on_an_expired_bucket_leaves_full_less_the_charge,
                a_charge_on_an_expired_bucket_follows_its_own_limits,
                a_charge_on_a_limit_that_the_bucket_lacks_adds_it,
                a_refund_on_an_absent_bucket_leaves_it_absent,
                a_refund_on_an_expired_bucket_leaves_it_absent,
                a_refund_next_to_a_charge_on_an_absent_bucket_is_ignored,
                a_refund_on_a_removed_limit_is_ignored,
                calls_that_only_settle_are_limited,
                a_charge_counts_on_a_bucket_deleted_since_its_acquire,
                settling_by_old_limits_keeps_the_new_ones,
                an_overflow_is_an_error_and_changes_nothing,
                settling_nothing_is_no_error,
            }
            lifetimes: run {
                an_idle_bucket_is_absent_exactly_from_its_expiry_on,
                an_acquire_renews_the_lifetime,
                a_debt_delays_the_expiry,
                a_bucket_created_by_a_late_charge_expires_when_it_is_full,
                an_acquire_gives_a_late_charge_the_lifetime_of_its_target,
                a_bucket_kept_forever_never_expires,
                a_lifetime_changes_with_the_plan,
                reconfigure_changes_the_lifetime,
            }
            peeking: run {
                buckets_are_peeked_in_the_order_of_the_keys,
                peeking_changes_nothing,
                a_bucket_at_the_bounds_of_its_limits_is_kept_whole,
            }
            concurrency: run_on_threads {
                many_tasks_together_take_exactly_the_capacity,
                chains_in_opposite_order_do_not_deadlock,
                every_concurrent_settlement_counts,
                aborted_acquires_leave_what_the_others_took,
            }
            cancellation: run {
                an_acquire_that_is_never_polled_does_nothing,
                changes_that_are_never_polled_do_nothing,
                a_dropped_acquire_leaves_no_tokens_taken,
                an_acquire_dropped_when_its_reply_is_ready_leaves_no_tokens_taken,
                a_dropped_settlement_is_carried_out,
            }
            $($($more)+)?
        }
    };
}

/// Tests stores that change all buckets of a chain in one step: no reader ever sees half of a
/// chain, and a refused chain changes nothing. The arguments are those of [`conformance_tests!`].
///
/// ```
/// # use std::sync::Arc;
/// # use zae_limiter_core::Store;
/// # fn open() -> Arc<dyn Store> { unimplemented!() }
/// zae_limiter_testkit::one_step_conformance_tests!(my_store_steps, || async { open() });
/// ```
#[macro_export]
macro_rules! one_step_conformance_tests {
    ($module:ident, $make:expr) => {
        $crate::__tests! { $module, $make,
            concurrency: run_on_threads {
                a_chain_is_seen_whole_or_not_at_all,
            }
            refusal: run {
                a_refused_plan_leaves_no_trace,
            }
            settling: run {
                an_overflow_of_one_bucket_leaves_the_others_alone,
            }
            lifetimes: run {
                a_bucket_that_starts_anew_has_consumed_nothing,
            }
            random: run {
                a_random_run_of_chains_equals_the_oracle_while_rates_change,
                a_random_run_of_chains_equals_the_oracle_while_limits_come_and_go,
            }
        }
    };
}

/// Tests the usage records of a store that keeps them itself, with
/// [`UsageSettings::default`](zae_limiter_core::UsageSettings). The arguments are those of
/// [`conformance_tests!`].
///
/// ```
/// # use std::sync::Arc;
/// # use zae_limiter_core::Store;
/// # fn open() -> Arc<dyn Store> { unimplemented!() }
/// zae_limiter_testkit::usage_conformance_tests!(my_store_usage, || async { open() });
/// ```
#[macro_export]
macro_rules! usage_conformance_tests {
    ($module:ident, $make:expr) => {
        $crate::__tests! { $module, $make,
            usage: run {
                what_is_taken_is_booked_to_every_window,
                settlements_are_booked_to_their_own_time,
                a_refused_plan_records_no_usage,
                a_chain_records_usage_of_each_entity,
                windows_change_exactly_at_their_borders,
                a_clock_that_runs_back_records_to_its_own_window,
                a_late_charge_is_booked,
                usage_outlives_its_bucket,
                usage_outlives_its_limit,
                a_record_is_kept_for_the_retention_after_its_window,
                listed_usage_is_ordered_and_paged,
                a_dropped_acquire_is_not_booked,
                a_random_run_is_booked_to_the_millitoken,
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    ($module:ident, $make:expr, $($topic:ident: $runner:ident { $($check:ident,)+ })+) => {
        #[cfg(test)]
        mod $module {
            #[allow(unused_imports)]
            use super::*;

            $(
                mod $topic {
                    #[allow(unused_imports)]
                    use super::*;

                    $(
                        #[test]
                        fn $check() {
                            $crate::$runner($make, $crate::checks::$topic::$check);
                        }
                    )+
                }
            )+
        }
    };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    /// A check that no macro lists would never run.
    #[test]
    fn every_check_is_listed_in_a_macro() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let macros = std::fs::read_to_string(source.join("conformance.rs")).unwrap();
        let named: BTreeSet<&str> =
            macros.lines().filter_map(|line| line.trim().strip_suffix(',')).collect();
        for file in std::fs::read_dir(source.join("checks")).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            for line in text.lines().filter_map(|line| line.strip_prefix("pub async fn ")) {
                let check = line.split('(').next().unwrap();
                assert!(named.contains(check), "add {check} to a macro");
            }
        }
    }
}
