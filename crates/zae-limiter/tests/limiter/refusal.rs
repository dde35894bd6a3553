//! The contents of a refusal, which are exact.

use std::time::Duration;

use zae_limiter::store::Cursor;
use zae_limiter::{Error, Limit, LimitStatus, RateLimitExceeded};

use crate::world::{
    child, exceeded, ms, on_every_store, own_limits, per_minute, refusal, secs, spend,
    without_refill,
};

/// Whose, which, available, requested, exceeded, wait in milliseconds.
type Seen = (usize, String, String, i64, i64, bool, u128);

fn seen(statuses: &[LimitStatus]) -> Vec<Seen> {
    let one = |status: &LimitStatus| {
        (
            status.level,
            status.entity_id.to_string(),
            status.limit_name.to_string(),
            status.available.get(),
            status.requested.get(),
            status.exceeded,
            status.retry_after.as_millis(),
        )
    };
    statuses.iter().map(one).collect()
}

#[test]
fn every_limit_that_was_checked_is_listed_with_its_level() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "team", "org").await;
        child(&limiter, "key", "team").await;
        own_limits(&limiter, "key", [per_minute("rpm", 60), per_minute("tpm", 600)]).await;
        own_limits(&limiter, "team", [per_minute("rpm", 6), per_minute("other", 1)]).await;
        own_limits(&limiter, "org", [per_minute("tpm", 60), per_minute("rpm", 6)]).await;
        let call = || limiter.acquire("key", "gpt-4").take("rpm", 4).take("tpm", 20);
        call().await.unwrap().commit().await.unwrap();
        world.advance(ms(500));

        let refused = exceeded(call().await);
        let row = |level, who: &str, what: &str, has, asked, wait: u128| {
            (level, who.to_owned(), what.to_owned(), has, asked, wait > 0, wait)
        };
        assert_eq!(
            seen(refused.statuses()),
            [
                row(0, "key", "rpm", 56_500, 4_000, 0),
                row(0, "key", "tpm", 585_000, 20_000, 0),
                // 4 of 6 are taken, half a second earned 0.05: 1.95 are missing at 0.1 a second.
                row(1, "team", "rpm", 2_050, 4_000, 19_500),
                row(2, "org", "rpm", 2_050, 4_000, 19_500),
                row(2, "org", "tpm", 40_500, 20_000, 0),
            ]
        );
        assert_eq!(refused.violations().count(), 2);
        assert_eq!(refused.primary_violation().level, 1);
        assert_eq!(refused.retry_after(), ms(19_500));
    });
}

#[test]
fn levels_are_counted_over_ancestors_without_limits() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "team", "org").await;
        child(&limiter, "key", "team").await;
        own_limits(&limiter, "key", [without_refill("rpm", 10)]).await;
        own_limits(&limiter, "org", [without_refill("rpm", 2)]).await;
        let lease = limiter.acquire("key", "gpt-4").take("rpm", 2).await.unwrap();
        let levels: Vec<usize> = lease.statuses().iter().map(|status| status.level).collect();
        assert_eq!(levels, [0, 2], "of an admitted call");
        lease.commit().await.unwrap();
        let refused = refusal(&limiter, "key", "gpt-4", "rpm", 1).await;
        let levels: Vec<usize> = refused.statuses().iter().map(|status| status.level).collect();
        assert_eq!(levels, [0, 2], "of a refused call");
    });
}

#[test]
fn the_wait_is_exact_to_the_millisecond() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        // What is taken first, how long ago that was, what is requested then.
        for (case, (own, above, first, passed, asked)) in [
            (per_minute("x", 100), None, 100, 0, 1),
            (per_minute("x", 100), None, 100, 599, 1),
            (per_minute("x", 100), None, 97, 1, 50),
            (Limit::per("x", 7, secs(3)).burst(20), None, 20, 1_234, 19),
            (Limit::per_day("x", 1_000), None, 1_000, 7, 1),
            (Limit::per_day("x", 7), None, 7, 12_345, 7),
            (Limit::per_second("x", 1_000), None, 1_000, 0, 3),
            (Limit::per("x", 3, secs(7)), Some(Limit::per("x", 5, secs(13))), 3, 777, 3),
            (per_minute("x", 100), Some(Limit::per("x", 11, secs(17))), 11, 333, 9),
        ]
        .into_iter()
        .enumerate()
        {
            let (key, org) = (format!("key-{case}"), format!("org-{case}"));
            limiter.create_entity(&org).await.unwrap();
            child(&limiter, &key, &org).await;
            own_limits(&limiter, &key, [own]).await;
            if let Some(above) = above {
                own_limits(&limiter, &org, [above]).await;
            }
            spend(&limiter, &key, "gpt-4", "x", first).await;
            world.advance(ms(passed));
            let refused = refusal(&limiter, &key, "gpt-4", "x", asked).await;
            let wait = refused.retry_after();
            assert!(wait > Duration::ZERO);
            world.advance(wait - ms(1));
            let late = refusal(&limiter, &key, "gpt-4", "x", asked).await;
            assert_eq!(late.retry_after(), ms(1), "case {case} passes a millisecond too early");
            world.advance(ms(1));
            spend(&limiter, &key, "gpt-4", "x", asked).await;
        }
    });
}

#[test]
fn a_debt_is_part_of_the_wait() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("tpm", 60)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 60).await.unwrap();
        lease.adjust("tpm", 30).unwrap();
        lease.commit().await.unwrap();
        let refused = refusal(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(refused.statuses()[0].available.whole_tokens(), -30);
        assert_eq!(refused.retry_after(), secs(31));
        world.advance(secs(31) - ms(1));
        refusal(&limiter, "key", "gpt-4", "tpm", 1).await;
        world.advance(ms(1));
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
    });
}

#[test]
fn a_busy_limit_does_not_starve_a_slow_one() {
    on_every_store(async |world| {
        let limits = [per_minute("rpm", 6_000), Limit::per_day("rpd", 1_000)];
        let limiter = world.limiter_with(limits).await;
        spend(&limiter, "key", "gpt-4", "rpd", 1_000).await;
        // 86.4 s earn one; meanwhile the other limit is taken from every 50 ms.
        for _ in 0..1_728 - 1 {
            world.advance(ms(50));
            spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        }
        world.advance(ms(49));
        refusal(&limiter, "key", "gpt-4", "rpd", 1).await;
        world.advance(ms(1));
        spend(&limiter, "key", "gpt-4", "rpd", 1).await;
    });
}

#[test]
fn debug_output_does_not_show_the_entity() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 1)]).await;
        let lease = limiter.acquire("sk-secret", "gpt-4").take("rpm", 1).await.unwrap();
        let refused: RateLimitExceeded = refusal(&limiter, "sk-secret", "gpt-4", "rpm", 1).await;
        let unknown = limiter.acquire("sk-secret", "gpt-4").take("x", 1).await.unwrap_err();
        let too_much = limiter.acquire("sk-secret", "gpt-4").take("rpm", 2).await.unwrap_err();
        let pages = limiter.children("sk-secret").unwrap();
        let shown = [
            format!("{:?}", limiter.acquire("sk-secret", "gpt-4").take("rpm", 1)),
            format!("{:?}", limiter.create_entity("sk-secret").parent("sk-secret")),
            format!("{:?}", limiter.usage().entity("sk-secret")),
            format!("{:?} {:?}", Cursor::new("memory:sk-secret"), pages),
            format!("{lease:?}"),
            format!("{:?}", lease.statuses()),
            format!("{refused:?}"),
            format!("{:?}", Error::from(refused)),
            format!("{unknown:?}"),
            format!("{too_much:?}"),
            format!("{limiter:?}"),
        ];
        for text in shown {
            assert!(!text.contains("sk-secret"), "{text}");
        }
    });
}
