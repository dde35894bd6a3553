//! Walks through a table in the order of its keys, without keeping others from it for long.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::sync::Mutex;

use super::locked;

/// The most items that are visited under the lock: about as many as a page has.
const VISIT_MAX: usize = 1_024;

/// Visits the items from `start` on, until the visitor breaks. Between [`VISIT_MAX`] items, others get the lock: what they
/// add or remove may be visited or not, and everything else is visited once. Returns the number of visits.
pub(super) fn scan<T, K: Ord + Clone, V>(
    table: &Mutex<T>,
    items: impl Fn(&T) -> &BTreeMap<K, V>,
    mut start: Bound<K>,
    mut visit: impl FnMut(&K, &V) -> ControlFlow<()>,
) -> usize {
    let mut visits = 0;
    loop {
        let guard = locked(table);
        let mut rest = items(&guard).range((start.as_ref(), Bound::Unbounded));
        let mut last = None;
        for (key, item) in rest.by_ref().take(VISIT_MAX) {
            visits += 1;
            if visit(key, item).is_break() {
                return visits;
            }
            last = Some(key);
        }
        match (rest.next(), last) {
            (Some(_), Some(last)) => start = Bound::Excluded(last.clone()),
            _ => return visits,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_is_free_between_two_portions_and_every_item_is_visited_once() {
        for len in [0, 1, VISIT_MAX, VISIT_MAX + 1, 10 * VISIT_MAX] {
            let table = Mutex::new((0..len).map(|key| (key, ())).collect::<BTreeMap<_, _>>());
            let locks = std::cell::Cell::new(0);
            let mut seen = Vec::new();
            let visit = |key: &usize, (): &()| {
                seen.push(*key);
                ControlFlow::Continue(())
            };
            let visits = scan(
                &table,
                // Called once for each time that the lock is taken.
                |table| {
                    locks.set(locks.get() + 1);
                    table
                },
                Bound::Unbounded,
                visit,
            );
            assert!(seen.into_iter().eq(0..len));
            assert_eq!((visits, locks.get()), (len, len.div_ceil(VISIT_MAX).max(1)));
        }
    }

    #[test]
    fn a_scan_begins_after_its_start_and_ends_at_a_break() {
        let table = Mutex::new((0..10).map(|key| (key, ())).collect::<BTreeMap<_, _>>());
        let mut seen = Vec::new();
        let visits = scan(
            &table,
            |table| table,
            Bound::Excluded(3),
            |key, ()| {
                seen.push(*key);
                if *key == 6 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            },
        );
        assert_eq!((seen, visits), (vec![4, 5, 6], 3));
    }
}
