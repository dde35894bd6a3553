//! Buckets, usage, pages and streams.

use std::collections::BTreeMap;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use futures_util::Stream;
use zae_limiter::store::{PAGE_MAX, StoreErrorKind};
use zae_limiter::{Error, Limit, Pages, RateLimiter, Timestamp, Window};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    Kind, NOW, child, on_every_store, on_every_store_but, own_limits, per_minute, poll_once, secs,
    spend, turn, without_refill,
};

async fn next<T: Unpin>(pages: &mut Pages<T>) -> Option<Result<T, Error>> {
    for _ in 0..100_000 {
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(item) = Pin::new(&mut *pages).poll_next(&mut context) {
            return item;
        }
        turn().await;
    }
    panic!("the stream does not go on");
}

/// Promise: by resource, expired ones left out, every page size, the limits that hold now; nothing is taken or written.
#[test]
fn the_buckets_of_an_entity_in_pages_of_any_size() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        for at in 0..70 {
            let resource = format!("m{at:02}");
            spend(&limiter, "key", &resource, "rpm", 10).await;
            spend(&limiter, "kez", &resource, "rpm", 1).await;
        }
        // Every third has limits of its own and does not expire.
        for at in (0..70).step_by(3) {
            let resource = format!("m{at:02}");
            limiter.set_limits("key", Some(&resource), [without_refill("rpm", 100)]).await.unwrap();
        }
        let writes = [Call::Acquire, Call::Settle, Call::Reconfigure, Call::Write]
            .map(|c| world.store.calls(c));
        for (passed, expected) in [(0, 70), (10_000, 24)] {
            world.advance(secs(passed));
            for size in [0, 1, 2, 7, 69, 70, 71, PAGE_MAX, usize::MAX] {
                let mut pages = limiter.buckets("key").unwrap().page_size(size);
                let mut resources = Vec::new();
                while let Some(page) = pages.next_page().await.unwrap() {
                    assert!(
                        !page.is_empty() && page.len() <= size.max(1),
                        "{} on a page of {size}",
                        page.len()
                    );
                    for bucket in page {
                        assert_eq!(bucket.limits.len(), 1);
                        assert_eq!(bucket.limits[0].level, 0);
                        assert!(
                            bucket.expires_at.is_none_or(|at| at > world.store_now()),
                            "expired"
                        );
                        resources.push(bucket.resource.to_string());
                    }
                }
                assert_eq!(resources.len(), expected, "{passed} s later, in pages of {size}");
                assert!(resources.is_sorted());
                assert!(pages.next_page().await.unwrap().is_none());
            }
        }
        let after = [Call::Acquire, Call::Settle, Call::Reconfigure, Call::Write]
            .map(|c| world.store.calls(c));
        assert_eq!(after, writes, "reading has written");
    });
}

trait Now {
    fn store_now(&self) -> Timestamp;
}

impl Now for crate::world::World {
    fn store_now(&self) -> Timestamp {
        use zae_limiter::testing::Clock as _;
        self.clock.now()
    }
}

/// Promise: what `buckets` shows is what `available` shows, for the entity itself, with a parent and after changes.
#[test]
fn buckets_show_what_available_shows() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "org", [per_minute("rpm", 600), per_minute("tpm", 600)]).await;
        own_limits(&limiter, "key", [per_minute("rpm", 60), per_minute("tpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 30).await;
        let check = async |what: &str| {
            let bucket = limiter.buckets("key").unwrap().all().await.unwrap().remove(0);
            let shown: Vec<_> = bucket
                .limits
                .iter()
                .map(|l| (l.limit_name.clone(), l.available, l.rate, l.level))
                .collect();
            let there = limiter.available("key", "gpt-4", &[]).await.unwrap();
            let own = there.iter().filter(|l| l.level == 0);
            let own: Vec<_> =
                own.map(|l| (l.limit_name.clone(), l.available, l.rate, l.level)).collect();
            assert_eq!(shown, own, "{what}");
        };
        check("at first").await;
        world.advance(secs(3));
        check("later").await;
        own_limits(&limiter, "key", [per_minute("rpm", 20), per_minute("new", 5)]).await;
        check("after a change").await;
        let mut lease = limiter.acquire("key", "gpt-4").take("new", 5).await.unwrap();
        lease.adjust("new", 50).unwrap();
        lease.commit().await.unwrap();
        check("in debt").await;
        limiter.delete_limits("key", None).await.unwrap();
        limiter.set_resource_defaults("gpt-4", [Limit::per_day("rpm", 7)]).await.unwrap();
        check("on defaults").await;
    });
}

async fn family(limiter: &RateLimiter, children: usize) {
    limiter.create_entity("org").await.unwrap();
    for at in 0..children {
        limiter.create_entity(&format!("key-{at:03}")).parent("org").await.unwrap();
    }
}

/// Promise: however stream and pages are mixed, each item comes once and in order.
#[test]
fn a_stream_mixed_with_pages_gives_each_item_once() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        family(&limiter, 23).await;
        for seed in 0..40 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut pages = limiter.children("org").unwrap().page_size(random.usize(0..9));
            let mut ids = Vec::new();
            loop {
                match random.u8(0..4) {
                    0 => match pages.next_page().await.unwrap() {
                        Some(page) => {
                            ids.extend(page.into_iter().map(|child| child.id.to_string()));
                        }
                        None => break,
                    },
                    1 => {
                        // A page that the stream has begun to read is not lost.
                        let mut context = Context::from_waker(Waker::noop());
                        if let Poll::Ready(item) = Pin::new(&mut pages).poll_next(&mut context) {
                            match item {
                                Some(child) => ids.push(child.unwrap().id.to_string()),
                                None => break,
                            }
                        }
                    }
                    2 => {
                        // A call of next_page that is dropped halfway is not lost either.
                        if let Poll::Ready(page) = poll_once(pin!(pages.next_page())) {
                            match page.unwrap() {
                                Some(page) => {
                                    ids.extend(page.into_iter().map(|child| child.id.to_string()));
                                }
                                None => break,
                            }
                        }
                        pages = pages.page_size(random.usize(0..9));
                    }
                    _ => match next(&mut pages).await {
                        Some(child) => ids.push(child.unwrap().id.to_string()),
                        None => break,
                    },
                }
            }
            let expected: Vec<_> = (0..23).map(|at| format!("key-{at:03}")).collect();
            assert_eq!(ids, expected, "seed {seed}");
        }
    });
}

/// Promise: "The stream ends after the last item, or after the first error"; `next_page` reads the same page again.
#[test]
fn a_stream_that_failed_halfway_can_be_read_on_by_pages() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        family(&limiter, 5).await;
        let mut pages = limiter.children("org").unwrap().page_size(2);
        assert!(next(&mut pages).await.unwrap().is_ok());
        assert!(next(&mut pages).await.unwrap().is_ok());
        world.store.script(Call::List, Fault::FailBefore(StoreErrorKind::Denied));
        assert!(next(&mut pages).await.unwrap().is_err());
        for _ in 0..3 {
            assert!(next(&mut pages).await.is_none());
        }
        world.store.script(Call::List, Fault::FailBefore(StoreErrorKind::Denied));
        assert!(pages.next_page().await.is_err());
        assert_eq!(pages.next_page().await.unwrap().unwrap()[0].id.as_str(), "key-002");
        assert_eq!(pages.all().await.unwrap().len(), 1);
    });
}

/// Promise: nothing is read before the first page is asked for; dropping halfway is no harm.
#[test]
fn a_list_that_nobody_reads_reads_nothing() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        family(&limiter, 5).await;
        let before = world.store.all_calls();
        drop(limiter.children("org").unwrap().page_size(1));
        drop(limiter.buckets("org").unwrap());
        assert_eq!(world.store.all_calls(), before);
        let gate = Gate::new();
        world.store.script(Call::List, Fault::HoldBefore(gate.clone()));
        let mut pages = limiter.children("org").unwrap().page_size(1);
        let mut context = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut pages).poll_next(&mut context).is_pending());
        drop(pages);
        gate.open();
        assert_eq!(limiter.children("org").unwrap().all().await.unwrap().len(), 5);
    });
}

/// Promise: `average` is net consumption per record, in tokens; windows without a record do not count.
#[test]
fn averages_are_per_record() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limiter = world
            .limiter_with([without_refill("rpm", 1_000), without_refill("tpm", 1_000_000)])
            .await;
        let taken = [("key", 0, 10, 0), ("key", 1, 5, 3), ("key", 5, 0, 4), ("kez", 5, 7, 1)];
        for (entity, hour, rpm, tpm) in taken {
            world.clock.set(Timestamp::from_millis(NOW.as_millis() + hour * 3_600_000));
            let call = limiter.acquire(entity, "gpt-4").take("rpm", rpm).take("tpm", tpm);
            call.await.unwrap().commit().await.unwrap();
        }
        let check = async |summary: zae_limiter::UsageSummary, records: u64, rpm: i64, tpm: i64| {
            assert_eq!(summary.records, records);
            let expected: BTreeMap<&str, i64> = [("rpm", rpm), ("tpm", tpm)].into();
            for (name, total) in expected {
                assert_eq!(summary.consumed.get(name).copied().unwrap_or(0), total, "{name}");
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                let average = total as f64 / records as f64;
                let shown = summary.average.get(name).copied().unwrap_or(0.0);
                assert!((shown - average).abs() < 1e-9, "{name}: {shown}, not {average}");
            }
        };
        check(
            limiter.usage().entity("key").window(Window::Hourly).summary().await.unwrap(),
            3,
            15,
            7,
        )
        .await;
        check(
            limiter.usage().resource("gpt-4").window(Window::Hourly).summary().await.unwrap(),
            4,
            22,
            8,
        )
        .await;
        let none = limiter.usage().entity("nobody").summary().await.unwrap();
        assert!(none.average.is_empty() && none.records == 0 && none.first.is_none());
    });
}

/// Promise (`BucketStatus::expires_at`): when the bucket expires if nobody uses it; never before a debt is repaid.
#[test]
fn a_bucket_is_there_until_its_expiry() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([Limit::per("rpm", 7, secs(9)).burst(11)]).await;
        for debt in [0_i64, 1_000] {
            let id = format!("key-{debt}");
            world.advance(crate::world::ms(333));
            let mut lease = limiter.acquire(&id, "gpt-4").take("rpm", 5).await.unwrap();
            lease.adjust("rpm", debt).unwrap();
            lease.commit().await.unwrap();
            let bucket = limiter.buckets(&id).unwrap().all().await.unwrap().remove(0);
            let expires = bucket.expires_at.expect("it is on defaults");
            let full = bucket.limits[0].full_after;
            assert!(expires >= world.store_now().saturating_add(full), "before it is full again");
            world.clock.set(Timestamp::from_millis(expires.as_millis() - 1));
            let left = limiter.buckets(&id).unwrap().all().await.unwrap();
            assert_eq!(left.len(), 1, "a millisecond before");
            assert_eq!(left[0].expires_at, Some(expires));
            world.clock.set(expires);
            assert!(
                limiter.buckets(&id).unwrap().all().await.unwrap().is_empty(),
                "at that moment"
            );
        }
    });
}

/// Promise: buckets that only a call's own limits made are listed; what holds for them now is nothing.
#[test]
fn a_bucket_of_call_overrides_is_listed() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let call = limiter.acquire("key", "gpt-4").take("rpm", 5).limits([per_minute("rpm", 60)]);
        call.await.unwrap().commit().await.unwrap();
        let buckets = limiter.buckets("key").unwrap().all().await.unwrap();
        assert_eq!(buckets.len(), 1);
    });
}
