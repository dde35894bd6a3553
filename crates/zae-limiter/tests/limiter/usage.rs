//! What was used, by window.

use zae_limiter::model::{Usage, format_time};
use zae_limiter::testing::Clock as _;
use zae_limiter::{Error, RateLimiter, Timestamp, UsageSummary, Window};

use crate::world::{
    Kind, World, child, ms, on_every_store, on_every_store_but, own_limits, per_minute, secs, soon,
    spend, without_refill,
};

const HOUR: u64 = 3_600;

async fn records(limiter: &RateLimiter, entity: &str, window: Window) -> Vec<Usage> {
    let query = limiter.usage().entity(entity).window(window);
    query.pages().unwrap().all().await.unwrap()
}

/// Start of the window, tokens of `tpm`, events.
async fn booked(limiter: &RateLimiter, entity: &str, window: Window) -> Vec<(String, i64, u64)> {
    let row = |usage: Usage| {
        let tokens: i64 = usage.consumed.values().map(|consumed| consumed.whole_tokens()).sum();
        (window.label(usage.key.start), tokens, usage.events)
    };
    records(limiter, entity, window).await.into_iter().map(row).collect()
}

/// Usage on DynamoDB is booked by the aggregator, from the table's stream; `zae-limiter-aggregator` tests it.
const BOOKED_BY_ANOTHER: &[Kind] = &[Kind::DynamoDb];

fn row(start: &str, tokens: i64, events: u64) -> (String, i64, u64) {
    (start.to_owned(), tokens, events)
}

fn set(world: &World, at: Timestamp) {
    world.clock.set(at);
}

#[test]
fn what_is_taken_is_booked_to_the_windows_of_its_moment() {
    on_every_store_but(BOOKED_BY_ANOTHER, async |world| {
        let limiter = world.limiter_with([per_minute("tpm", 1_000)]).await;
        // The last millisecond of a month, and the first of the next.
        let next_month = Timestamp::from_millis(1_796_083_200_000);
        assert_eq!(format_time(next_month), "2026-12-01T00:00:00Z");
        set(&world, Timestamp::from_millis(next_month.as_millis() - 1));
        spend(&limiter, "key", "gpt-4", "tpm", 10).await;
        world.advance(ms(1));
        spend(&limiter, "key", "gpt-4", "tpm", 20).await;
        world.advance(secs(HOUR) - ms(1));
        spend(&limiter, "key", "gpt-4", "tpm", 30).await;
        world.advance(ms(1));
        spend(&limiter, "key", "gpt-4", "tpm", 40).await;
        assert_eq!(
            booked(&limiter, "key", Window::Hourly).await,
            [
                row("2026-11-30T23:00:00Z", 10, 1),
                row("2026-12-01T00:00:00Z", 50, 2),
                row("2026-12-01T01:00:00Z", 40, 1)
            ]
        );
        let daily = [row("2026-11-30", 10, 1), row("2026-12-01", 90, 3)];
        assert_eq!(booked(&limiter, "key", Window::Daily).await, daily);
        let monthly = [row("2026-11", 10, 1), row("2026-12", 90, 3)];
        assert_eq!(booked(&limiter, "key", Window::Monthly).await, monthly);
    });
}

#[test]
fn differences_and_rollbacks_are_booked_to_their_own_time() {
    on_every_store_but(BOOKED_BY_ANOTHER, async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 1_000)]).await;
        let take =
            async |tokens| limiter.acquire("key", "gpt-4").take("tpm", tokens).await.unwrap();
        let mut adjusted = take(100).await;
        let undone = take(50).await;
        let dropped = take(7).await;
        world.advance(secs(HOUR));
        adjusted.adjust("tpm", -30).unwrap();
        adjusted.commit().await.unwrap();
        world.advance(secs(HOUR));
        undone.rollback().await.unwrap();
        drop(dropped);
        let hours = [
            row("2026-11-15T14:00:00Z", 157, 3),
            row("2026-11-15T15:00:00Z", -30, 1),
            row("2026-11-15T16:00:00Z", -57, 2),
        ];
        soon("booked", async || booked(&limiter, "key", Window::Hourly).await == hours).await;
        assert_eq!(booked(&limiter, "key", Window::Daily).await, [row("2026-11-15", 70, 6)]);
    });
}

#[test]
fn what_is_refused_or_nothing_is_not_booked() {
    on_every_store_but(BOOKED_BY_ANOTHER, async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 10).await;
        for _ in 0..3 {
            limiter.acquire("key", "gpt-4").take("tpm", 1).await.unwrap_err();
            spend(&limiter, "key", "gpt-4", "tpm", 0).await;
        }
        assert_eq!(booked(&limiter, "key", Window::Daily).await, [row("2026-11-15", 10, 1)]);
    });
}

#[test]
fn usage_is_summed_by_entity_by_resource_and_by_both() {
    on_every_store_but(BOOKED_BY_ANOTHER, async |world| {
        let limits = [without_refill("rpm", 1_000), without_refill("tpm", 1_000)];
        let limiter = world.limiter_with(limits).await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "b", "org").await;
        own_limits(&limiter, "org", [without_refill("tpm", 1_000)]).await;
        for (entity, on, tokens) in [("a", "gpt-4", 1), ("b", "gpt-4", 2), ("a", "gpt-5", 4)] {
            let call = limiter.acquire(entity, on).take("rpm", 1).take("tpm", tokens);
            call.await.unwrap().commit().await.unwrap();
        }
        world.advance(secs(HOUR));
        spend(&limiter, "a", "gpt-4", "tpm", 8).await;

        let totals = |summary: UsageSummary| {
            let consumed = summary.consumed.iter().map(|(name, sum)| format!("{name}={sum}"));
            let consumed = consumed.collect::<Vec<_>>().join(" ");
            (consumed, summary.events, summary.records)
        };
        let summary = async |entity: Option<&str>, on: Option<&str>| {
            let mut query = limiter.usage();
            query = entity.into_iter().fold(query, |query, entity| query.entity(entity));
            query = on.into_iter().fold(query, |query, on| query.resource(on));
            totals(query.summary().await.unwrap())
        };
        let sum = |text: &str, events, records| (text.to_owned(), events, records);
        assert_eq!(summary(Some("a"), None).await, sum("rpm=2 tpm=13", 3, 3));
        assert_eq!(summary(Some("a"), Some("gpt-4")).await, sum("rpm=1 tpm=9", 2, 2));
        assert_eq!(summary(Some("org"), None).await, sum("tpm=2", 1, 1));
        assert_eq!(summary(None, Some("gpt-4")).await, sum("rpm=2 tpm=13", 4, 4));
        assert_eq!(summary(None, Some("gpt-5")).await, sum("rpm=1 tpm=4", 1, 1));
        assert_eq!(summary(Some("nobody"), None).await, sum("", 0, 0));

        let whole = limiter.usage().entity("a").summary().await.unwrap();
        assert_eq!(whole.first.map(format_time).as_deref(), Some("2026-11-15T14:00:00Z"));
        assert_eq!(whole.last.map(format_time).as_deref(), Some("2026-11-15T15:00:00Z"));
        let on_resource = limiter.usage().resource("gpt-4").pages().unwrap();
        let order: Vec<String> = on_resource
            .page_size(1)
            .all()
            .await
            .unwrap()
            .into_iter()
            .map(|u| format!("{} {}", format_time(u.key.start), u.key.entity))
            .collect();
        assert_eq!(
            order,
            [
                "2026-11-15T14:00:00Z a",
                "2026-11-15T14:00:00Z b",
                "2026-11-15T14:00:00Z org",
                "2026-11-15T15:00:00Z a"
            ]
        );
    });
}

#[test]
fn a_range_names_windows_by_their_start() {
    on_every_store_but(BOOKED_BY_ANOTHER, async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 1_000)]).await;
        let first = world.clock.now();
        for _ in 0..4 {
            spend(&limiter, "key", "gpt-4", "tpm", 1).await;
            world.advance(secs(HOUR));
        }
        let hour = |n: u64| first.saturating_add(secs(n * HOUR));
        let between = async |from, until| {
            let query = limiter.usage().entity("key").from(from).until(until);
            query.summary().await.unwrap().records
        };
        assert_eq!(between(hour(1), hour(3)).await, 2);
        assert_eq!(between(hour(0), hour(4)).await, 4);
        assert_eq!(between(hour(2), hour(2)).await, 0);
        assert_eq!(between(hour(0).saturating_add(ms(1)), hour(1).saturating_add(ms(1))).await, 1);
    });
}

#[test]
fn records_expire_after_their_retention() {
    on_every_store_but(BOOKED_BY_ANOTHER, async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 1_000)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        // Ninety days after the hour, the day, the month has ended.
        let ninety_days = secs(90 * 86_400);
        let counts = async || {
            let mut counts = [0; 3];
            for (window, count) in Window::ALL.into_iter().zip(&mut counts) {
                *count = records(&limiter, "key", window).await.len();
            }
            counts
        };
        let now = world.clock.now();
        for (window, left) in Window::ALL.into_iter().zip([[0, 1, 1], [0, 0, 1], [0, 0, 0]]) {
            let expiry = window.end(now).saturating_add(ninety_days);
            set(&world, Timestamp::from_millis(expiry.as_millis() - 1));
            assert_eq!(counts().await.iter().sum::<usize>(), left.iter().sum::<usize>() + 1);
            set(&world, expiry);
            assert_eq!(counts().await, left, "{window}");
        }
    });
}

#[test]
fn a_question_without_a_subject_is_invalid() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        assert!(matches!(limiter.usage().pages(), Err(Error::Invalid(_))));
        assert!(matches!(limiter.usage().entity("").pages(), Err(Error::Invalid(_))));
        let summary = limiter.usage().resource("a b").summary().await;
        assert!(matches!(summary, Err(Error::Invalid(_))), "{summary:?}");
    });
}
