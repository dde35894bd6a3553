//! Usage records of stores that book usage themselves, with the default settings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Poll;

use fastrand::Rng;
use zae_limiter_core::{
    Admission, Key, LimitName, Millitokens, Placement, Query, Store, Target, Timestamp, Usage,
    UsageSettings, Window,
};

use crate::calls::{PAGE_SIZES, acquire, be_refused, delete, read_all, settle, take};
use crate::given::{
    DAY, HOUR, MINUTE, NOW, bucket, entity_id, forever, idle, later, leg, limits, per_minute, plan,
    resource, settlement, test_namespace, tokens, without_refill,
};
use crate::poll::{ByHand, soon};

fn always() -> std::ops::Range<Timestamp> {
    Timestamp::from_millis(i64::MIN)..Timestamp::from_millis(i64::MAX)
}

async fn list(store: &dyn Store, query: &Query, size: usize) -> Vec<Usage> {
    let fetch = async |page| store.list(query, &page).await;
    let records = read_all(size, fetch, async |_| {}).await;
    records.into_iter().map(|record| record.into_usage().expect("a usage record")).collect()
}

/// An entity's windows on all resources.
async fn usage_of(store: &dyn Store, entity: &str, window: Window) -> Vec<Usage> {
    let query = Query::UsageOfEntity(test_namespace(), entity_id(entity), None, window, always());
    list(store, &query, 7).await
}

/// The consumption without zeros: a store may list them or not.
fn consumed(usage: &Usage) -> BTreeMap<&str, Millitokens> {
    let totals = usage.consumed.iter().map(|(name, amount)| (name.as_str(), *amount));
    totals.filter(|(_, amount)| *amount != Millitokens::ZERO).collect()
}

/// Asserts that the entity has one window of each kind, with these totals.
async fn check_totals<const N: usize>(
    store: &dyn Store,
    entity: &str,
    totals: [(&str, Millitokens); N],
    events: u64,
) {
    for window in Window::ALL {
        let found = usage_of(store, entity, window).await;
        assert_eq!(found.len(), 1, "one {window} record of {entity}, but {found:#?}");
        assert_eq!(found[0].key.start, window.start(NOW), "the start of the {window} window");
        assert_eq!(consumed(&found[0]), BTreeMap::from(totals), "{window} totals of {entity}");
        assert_eq!(found[0].events, events, "{window} events of {entity}");
    }
}

fn rpm_and_tpm(entity: &str) -> Arc<Target> {
    let set = limits([without_refill("rpm", 100), without_refill("tpm", 1_000)]);
    forever(bucket(entity, "r"), &set)
}

pub async fn what_is_taken_is_booked_to_every_window(store: Arc<dyn Store>) {
    let target = rpm_and_tpm("a");
    take(&*store, NOW, [leg(&target, [("rpm", tokens(1)), ("tpm", tokens(300))])]).await;
    check_totals(&*store, "a", [("rpm", tokens(1)), ("tpm", tokens(300))], 1).await;
    // A list includes all calls that completed before it, however often it is read.
    take(&*store, later(5), [leg(&target, [("rpm", tokens(1)), ("tpm", tokens(0))])]).await;
    take(&*store, later(MINUTE), [leg(&target, [("tpm", Millitokens::new(1))])]).await;
    let totals = [("rpm", tokens(2)), ("tpm", Millitokens::new(300_001))];
    check_totals(&*store, "a", totals, 3).await;
    check_totals(&*store, "a", totals, 3).await;
}

pub async fn settlements_are_booked_to_their_own_time(store: Arc<dyn Store>) {
    let target = rpm_and_tpm("a");
    let takes = [("rpm", tokens(1)), ("tpm", tokens(300))];
    let placement = take(&*store, NOW, [leg(&target, takes)]).await[0].placement;
    settle(&*store, later(1), [settlement(&target, placement, [("tpm", tokens(-100))])]).await;
    check_totals(&*store, "a", [("rpm", tokens(1)), ("tpm", tokens(200))], 2).await;
    // The refund comes an hour later: the consumption of that hour is negative.
    let back = [("rpm", tokens(-1)), ("tpm", tokens(50))];
    settle(&*store, later(HOUR), [settlement(&target, placement, back)]).await;
    let hours = usage_of(&*store, "a", Window::Hourly).await;
    assert_eq!(hours.len(), 2, "two hours: {hours:#?}");
    let first = BTreeMap::from([("rpm", tokens(1)), ("tpm", tokens(200))]);
    assert_eq!(consumed(&hours[0]), first, "the first hour");
    let second = BTreeMap::from([("rpm", tokens(-1)), ("tpm", tokens(50))]);
    assert_eq!(consumed(&hours[1]), second, "the second hour");
    let days = usage_of(&*store, "a", Window::Daily).await;
    assert_eq!(consumed(&days[0]), BTreeMap::from([("tpm", tokens(250))]), "the day");
    assert_eq!(days[0].events, 3, "two settlements and an acquire");
}

pub async fn a_refused_plan_records_no_usage(store: Arc<dyn Store>) {
    let [child, parent] = ["child", "parent"].map(rpm_and_tpm);
    take(&*store, NOW, [leg(&parent, [("rpm", tokens(100))])]).await;
    let legs = || [&child, &parent].map(|target| leg(target, [("rpm", tokens(1))]));
    be_refused(&*store, NOW, legs()).await;
    be_refused(&*store, later(HOUR), legs()).await;
    assert_eq!(usage_of(&*store, "child", Window::Hourly).await, [], "nothing was taken");
    check_totals(&*store, "parent", [("rpm", tokens(100))], 1).await;
}

pub async fn a_chain_records_usage_of_each_entity(store: Arc<dyn Store>) {
    let chain = ["a", "b", "c"].map(rpm_and_tpm);
    for _ in 0..3 {
        take(&*store, NOW, chain.iter().map(|target| leg(target, [("tpm", tokens(5))]))).await;
    }
    for entity in ["a", "b", "c"] {
        check_totals(&*store, entity, [("tpm", tokens(15))], 3).await;
    }
}

pub async fn windows_change_exactly_at_their_borders(store: Arc<dyn Store>) {
    let target = rpm_and_tpm("a");
    // 2026-11-30T23:59:59.999Z and the millisecond after it.
    let border = 15 * DAY + 10 * HOUR;
    for (amount, at) in [(1, border - 1), (10, border)] {
        take(&*store, later(at), [leg(&target, [("rpm", tokens(amount))])]).await;
    }
    let starts = [
        (Window::Hourly, ["2026-11-30T23:00:00Z", "2026-12-01T00:00:00Z"]),
        (Window::Daily, ["2026-11-30", "2026-12-01"]),
        (Window::Monthly, ["2026-11", "2026-12"]),
    ];
    for (window, labels) in starts {
        let found = usage_of(&*store, "a", window).await;
        let found: Vec<_> =
            found.iter().map(|u| (window.label(u.key.start), consumed(u))).collect();
        let [before, after] = labels.map(String::from);
        let of = |amount| BTreeMap::from([("rpm", tokens(amount))]);
        assert_eq!(found, [(before, of(1)), (after, of(10))], "{window}");
    }
}

pub async fn a_clock_that_runs_back_records_to_its_own_window(store: Arc<dyn Store>) {
    let target = rpm_and_tpm("a");
    for (amount, at) in [(1, 0), (10, HOUR), (20, HOUR - 1), (5, 2 * HOUR)] {
        take(&*store, later(at), [leg(&target, [("rpm", tokens(amount))])]).await;
    }
    let found = usage_of(&*store, "a", Window::Hourly).await;
    let found: Vec<_> = found.iter().map(|usage| consumed(usage)["rpm"]).collect();
    assert_eq!(found, [21, 10, 5].map(tokens), "each hour's own");
}

pub async fn a_late_charge_is_booked(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 60);
    // On an absent bucket, on an expired one whose usage is not booked yet, and next to a refund
    // that is ignored.
    settle(&*store, NOW, [settlement(&target, Placement::default(), [("rpm", tokens(4))])]).await;
    settle(
        &*store,
        later(MINUTE),
        [settlement(&target, Placement::default(), [("rpm", tokens(3))])],
    )
    .await;
    settle(
        &*store,
        later(2 * MINUTE),
        [settlement(&target, Placement::default(), [("rpm", tokens(-3))])],
    )
    .await;
    check_totals(&*store, "a", [("rpm", tokens(7))], 2).await;
    // On a limit that the bucket lacks.
    let both = limits([per_minute("rpm", 10), per_minute("tpm", 10)]);
    let both = idle(bucket("a", "r"), &both, 60);
    take(&*store, later(3 * MINUTE), [leg(&target, [("rpm", tokens(1))])]).await;
    let charge = [("tpm", tokens(5))];
    settle(&*store, later(3 * MINUTE), [settlement(&both, Placement::default(), charge)]).await;
    check_totals(&*store, "a", [("rpm", tokens(8)), ("tpm", tokens(5))], 4).await;
}

pub async fn usage_outlives_its_bucket(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 60);
    take(&*store, NOW, [leg(&target, [("rpm", tokens(7))])]).await;
    // A new bucket takes the place of the expired one within the same hour.
    take(&*store, later(MINUTE), [leg(&target, [("rpm", tokens(2))])]).await;
    check_totals(&*store, "a", [("rpm", tokens(9))], 2).await;
    delete(&*store, [Key::Bucket(target.key().clone())]).await;
    check_totals(&*store, "a", [("rpm", tokens(9))], 2).await;
    take(&*store, later(2 * MINUTE), [leg(&target, [("rpm", tokens(1))])]).await;
    check_totals(&*store, "a", [("rpm", tokens(10))], 3).await;
}

pub async fn usage_outlives_its_limit(store: Arc<dyn Store>) {
    let both = rpm_and_tpm("a");
    take(&*store, NOW, [leg(&both, [("rpm", tokens(1)), ("tpm", tokens(300))])]).await;
    let one = forever(both.key().clone(), &limits([without_refill("rpm", 100)]));
    store.reconfigure(&one, NOW).await.expect("reconfigure must answer");
    take(&*store, NOW, [leg(&one, [("rpm", tokens(1))])]).await;
    check_totals(&*store, "a", [("rpm", tokens(2)), ("tpm", tokens(300))], 2).await;
}

pub async fn a_record_is_kept_for_the_retention_after_its_window(store: Arc<dyn Store>) {
    take(&*store, NOW, [leg(&rpm_and_tpm("a"), [("rpm", tokens(1))])]).await;
    let retention = UsageSettings::default().retention;
    for window in Window::ALL {
        let found = usage_of(&*store, "a", window).await;
        let expiry = window.end(NOW).saturating_add(retention);
        assert_eq!(found[0].expires_at, Some(expiry), "{window}");
    }
}

pub async fn listed_usage_is_ordered_and_paged(store: Arc<dyn Store>) {
    let set = limits([without_refill("rpm", 1_000)]);
    let (entities, resources, hours) = (["a", "a-b", "b"], ["r", "r-2"], [0, 1, 25]);
    for hour in hours {
        for (entity, on) in entities.iter().flat_map(|e| resources.map(|r| (*e, r))) {
            let target = forever(bucket(entity, on), &set);
            take(&*store, later(hour * HOUR), [leg(&target, [("rpm", tokens(1))])]).await;
        }
    }
    for size in PAGE_SIZES {
        let query =
            Query::UsageOfEntity(test_namespace(), entity_id("a"), None, Window::Hourly, always());
        let found = list(&*store, &query, size).await;
        let found: Vec<_> = found.iter().map(|u| (u.key.resource.as_str(), u.key.start)).collect();
        let expected: Vec<_> =
            resources.iter().flat_map(|on| hours.map(|h| (*on, later(h * HOUR)))).collect();
        assert_eq!(found, expected, "by resource, then start, in pages of {size}");

        let within = later(HOUR)..later(26 * HOUR);
        let query = Query::UsageOfResource(test_namespace(), resource("r"), Window::Hourly, within);
        let found = list(&*store, &query, size).await;
        let found: Vec<_> = found.iter().map(|u| (u.key.start, u.key.entity.as_str())).collect();
        let hours = [1, 25].into_iter();
        let expected: Vec<_> = hours.flat_map(|h| entities.map(|e| (later(h * HOUR), e))).collect();
        assert_eq!(found, expected, "by start, then entity, in pages of {size}");
    }
}

pub async fn a_dropped_acquire_is_not_booked(store: Arc<dyn Store>) {
    let target = rpm_and_tpm("a");
    take(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    let mut taken = 1;
    for _ in 0..20 {
        let plan = plan(NOW, [leg(&target, [("rpm", tokens(2))])]);
        let mut call = ByHand::new(store.acquire(&plan));
        if let Poll::Ready(answer) = call.poll() {
            assert!(matches!(answer, Ok(Admission::Taken(_))), "there is enough: {answer:?}");
            taken += 2;
        }
    }
    soon("net consumption equals the replies", async || {
        let found = usage_of(&*store, "a", Window::Hourly).await;
        consumed(&found[0]).get("rpm") == Some(&tokens(taken))
    })
    .await;
}

pub async fn a_random_run_is_booked_to_the_millitoken(store: Arc<dyn Store>) {
    type Totals = BTreeMap<(Window, Timestamp), (BTreeMap<LimitName, Millitokens>, u64)>;
    let target = rpm_and_tpm("a");
    let mut random = Rng::with_seed(11);
    let mut expected = Totals::new();
    let mut now = 0;
    for _ in 0..300 {
        now += match random.u32(0..10) {
            0 => random.i64(0..3 * HOUR),
            1 => -random.i64(0..HOUR),
            2 => random.i64(0..3 * DAY),
            _ => random.i64(0..MINUTE),
        };
        let at = later(now);
        let [rpm, tpm] = [1..50_000, 1..500_000].map(|range| Millitokens::new(random.i64(range)));
        let asked = plan(at, [leg(&target, [("rpm", rpm), ("tpm", tpm)])]);
        let mut changes = Vec::new();
        let answer = acquire(&*store, &asked).await;
        if let Admission::Taken(taken) = answer {
            changes.push([rpm, tpm]);
            if random.u32(0..4) > 0 {
                let back = settlement(&target, taken[0].placement, [("rpm", -rpm), ("tpm", -tpm)]);
                settle(&*store, at, [back]).await;
                changes.push([-rpm, -tpm]);
            }
        }
        for (window, change) in changes.iter().flat_map(|c| Window::ALL.map(|w| (w, c))) {
            let (totals, events) = expected.entry((window, window.start(at))).or_default();
            *events += 1;
            for (name, amount) in target.limits().names().iter().zip(change) {
                let total = totals.entry(name.clone()).or_default();
                *total = total.saturating_add(*amount);
            }
        }
    }
    let mut found = Totals::new();
    for window in Window::ALL {
        for usage in usage_of(&*store, "a", window).await {
            found.insert((window, usage.key.start), (usage.consumed, usage.events));
        }
    }
    for (totals, _) in found.values_mut().chain(expected.values_mut()) {
        totals.retain(|_, amount| *amount != Millitokens::ZERO);
    }
    assert_eq!(found, expected);
}
