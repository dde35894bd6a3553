//! Limits as text and as serde reads them.

use std::time::Duration;

use fastrand::Rng;
use zae_limiter::Limit;
use zae_limiter::model::{
    CAPACITY_MAX, EntityId, LimitName, LimitSet, PERIOD_SECONDS_MAX, ResourceName,
};

fn valid(random: &mut Rng) -> Limit {
    let up_to = |random: &mut Rng, max: u64| (random.u64(..) >> random.u32(0..63)) % max + 1;
    let alphabet = "abcXYZ019_.-";
    let mut name = String::from(random.alphabetic());
    for _ in 0..random.usize(0..64) {
        name.push(alphabet.as_bytes()[random.usize(0..alphabet.len())].into());
    }
    let unit = [1, 60, 3_600, 86_400][random.usize(0..4)];
    let period = up_to(random, PERIOD_SECONDS_MAX / unit) * unit;
    let amount = up_to(random, CAPACITY_MAX);
    let limit = Limit::per(name, amount, Duration::from_secs(period));
    if random.bool() { limit.burst(up_to(random, CAPACITY_MAX)) } else { limit }
}

/// Promise: a limit is written as it is read, and a text that parses is a valid limit.
#[test]
fn every_valid_limit_comes_back() {
    let mut random = Rng::with_seed(3);
    let mut extremes = vec![
        Limit::per("a", 1, Duration::from_secs(1)),
        Limit::per("a", CAPACITY_MAX, Duration::from_secs(PERIOD_SECONDS_MAX)).burst(1),
        Limit::per("a", 1, Duration::from_secs(PERIOD_SECONDS_MAX)).burst(CAPACITY_MAX),
        Limit::per("min", 1, Duration::from_secs(61)),
        Limit::per("e5", 1, Duration::from_secs(59)),
    ];
    extremes.extend((0..50_000).map(|_| valid(&mut random)));
    for limit in extremes {
        if LimitSet::new([limit.clone()]).is_err() {
            panic!("not valid: {limit:?}");
        }
        let text = limit.to_string();
        assert_eq!(text.parse::<Limit>().as_ref(), Ok(&limit), "{text}");
        let json = serde_json::to_string(&limit).unwrap();
        assert_eq!(serde_json::from_str::<Limit>(&json).unwrap(), limit, "{json}");
        let quoted = serde_json::to_string(&text).unwrap();
        assert_eq!(serde_json::from_str::<Limit>(&quoted).unwrap(), limit, "{quoted}");
        // From a reader nothing can be borrowed.
        assert_eq!(serde_json::from_reader::<_, Limit>(json.as_bytes()).unwrap(), limit);
        let value = serde_json::to_value(&limit).unwrap();
        assert_eq!(serde_json::from_value::<Limit>(value).unwrap(), limit);
    }
}

/// Promise: `at()` names bytes of the input; a text that parses is valid and comes back; nothing panics.
#[test]
fn hostile_texts_are_pointed_at() {
    let pieces = [
        "rpm",
        "tpm",
        ":",
        "::",
        "/",
        "//",
        "_",
        "__",
        "1",
        "0",
        "00",
        "100",
        "10_000",
        "1_",
        "_1",
        " ",
        "\t",
        "\n",
        "\u{0}",
        "ä",
        "日本",
        "🦀",
        "e\u{301}",
        "\u{202e}",
        "\u{feff}",
        "min",
        "sec",
        "hour",
        "day",
        "week",
        "m",
        "s",
        "h",
        "d",
        "mins",
        "5min",
        "0min",
        "-1",
        "+1",
        "1.5",
        "1e3",
        "0x10",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999999999999999999999999",
        "1000000000000",
        "1000000000001",
        "٣",
        "１",
        "½",
        "wcu",
        "ttl",
        "PK",
        "",
        "MIN",
        "Min",
        "min ",
        "/min",
        ":5",
        "1000000000sec",
        "1000000001sec",
        "18446744073709551615day",
        "213503982334602day",
    ];
    let mut random = Rng::with_seed(4);
    let mut parsed = 0;
    for round in 0..300_000 {
        let text: String = if round % 3 == 0 {
            (0..random.usize(0..8)).map(|_| pieces[random.usize(0..pieces.len())]).collect()
        } else {
            let mut piece = || pieces[random.usize(0..pieces.len())];
            format!("rpm:{}/{}:{}", piece(), piece(), piece())
        };
        match text.parse::<Limit>() {
            Ok(limit) => {
                parsed += 1;
                assert!(
                    LimitSet::new([limit.clone()]).is_ok(),
                    "{text:?} is {limit:?}, which is invalid"
                );
                assert_eq!(limit.to_string().parse::<Limit>(), Ok(limit), "{text:?}");
            }
            Err(error) => {
                let at = error.at();
                assert!(text.get(at.clone()).is_some(), "{text:?}: {at:?} is not on boundaries");
                assert!(!error.problem().is_empty() && !error.rule().is_empty());
                assert!(!error.to_string().contains('\n'), "{text:?}: {error}");
            }
        }
    }
    assert!(parsed > 100, "{parsed}");
}

/// Promise: `_` stands between digits only; the default period is a minute; a count of zero is no period.
#[test]
fn texts_that_are_not_limits_do_not_parse() {
    let mut accepted = Vec::new();
    for text in [
        "",
        ":",
        "rpm",
        "rpm:",
        "rpm:_1",
        "rpm:1_",
        "rpm:1__0",
        "rpm:0",
        "rpm:-1",
        "rpm:+1",
        "rpm: 1",
        "rpm:1 ",
        " rpm:1",
        "rpm:1/",
        "rpm:1/0min",
        "rpm:1/min:",
        "rpm:1/min:0",
        "rpm:1:1:1",
        "rpm:1/min/min",
        "wcu:1",
        "ttl:1",
        "1rpm:1",
        "rpm:1000000000001",
        "rpm:1/1000000001sec",
        "rpm:1/1_",
        "rpm:1/_5min",
        "rpm:1/-5min",
        "rpm:1/5 min",
        "rpm:18446744073709551616",
        "rpm:1/18446744073709551615day",
        "rpm:1.0",
        "rpm:1e3",
        "rpm:٣",
        "rpm:1/week",
        "é:1",
    ] {
        accepted.extend(text.parse::<Limit>().ok().map(|limit| (text, limit)));
    }
    assert!(accepted.is_empty(), "{accepted:?}");
    assert_eq!("rpm:5".parse(), Ok(Limit::per_minute("rpm", 5)));
    assert_eq!("rpm:1_0_0/6_0sec:1_000".parse::<Limit>().map(|l| l.capacity).ok(), Some(1_000));
}

/// Promise: the map is checked; unknown, double, missing and wrong fields are errors and not guesses.
#[test]
fn maps_that_are_not_limits_are_errors() {
    for json in [
        "{}",
        "[]",
        "null",
        "5",
        "true",
        r#"{"name":"rpm"}"#,
        r#"{"capacity":5}"#,
        r#"{"name":"rpm","capacity":0}"#,
        r#"{"name":"rpm","capacity":-1}"#,
        r#"{"name":"rpm","capacity":1.5}"#,
        r#"{"name":"rpm","capacity":"5"}"#,
        r#"{"name":"rpm","capacity":1000000000001}"#,
        r#"{"name":"rpm","capacity":18446744073709551616}"#,
        r#"{"name":"wcu","capacity":5}"#,
        r#"{"name":"r p m","capacity":5}"#,
        r#"{"name":null,"capacity":5}"#,
        r#"{"name":"rpm","capacity":5,"refill_amount":0}"#,
        r#"{"name":"rpm","capacity":5,"refill_period_seconds":0}"#,
        r#"{"name":"rpm","capacity":5,"refill_period_seconds":0.5}"#,
        r#"{"name":"rpm","capacity":5,"refill_period_seconds":1000000001}"#,
        r#"{"name":"rpm","capacity":5,"capacity":6}"#,
        r#"{"name":"rpm","name":"rpm","capacity":5}"#,
        r#"{"name":"rpm","capacity":5,"burst":9}"#,
        r#"{"name":"rpm","capacity":5,"refill_ammount":9}"#,
        r#""rpm""#,
        r#""rpm:0""#,
        r#"["rpm:5"]"#,
    ] {
        let read = serde_json::from_str::<Limit>(json);
        assert!(read.is_err(), "{json} is {read:?}");
    }
    let read: Limit = serde_json::from_str(
        r#"{"refill_period_seconds":1,"refill_amount":2,"capacity":5,"name":"rpm"}"#,
    )
    .unwrap();
    assert_eq!(read, Limit::per_second("rpm", 2).burst(5));
    for json in [r#"["rpm:1","rpm:2"]"#, r#"["rpm:1",5]"#, "{}", r#""rpm:1""#] {
        assert!(serde_json::from_str::<LimitSet>(json).is_err(), "{json}");
    }
    let many: Vec<String> = (0..33).map(|at| format!("l{at}:1")).collect();
    assert!(serde_json::from_str::<LimitSet>(&serde_json::to_string(&many).unwrap()).is_err());
}

/// Promise: "A period with a fraction of a second, which no valid limit has, is an error"; names are checked; an entity
/// id is not in an error text.
#[test]
fn what_cannot_be_read_is_not_written_and_names_are_checked() {
    let odd = Limit::per("rpm", 1, Duration::from_millis(1_500));
    assert!(serde_json::to_string(&odd).is_err());
    assert!(!odd.to_string().is_empty());
    let _ = Limit::per("", u64::MAX, Duration::MAX).burst(0).to_string();
    assert!(serde_json::from_str::<LimitName>("\"wcu\"").is_err());
    assert!(serde_json::from_str::<ResourceName>("\"a b\"").is_err());
    let secret = "sk-live-0123456789abcdef s3cr3t";
    let error = serde_json::from_str::<EntityId>(&format!("\"{secret}\"")).unwrap_err();
    assert!(
        !error.to_string().contains("0123") && !error.to_string().contains("s3cr3t"),
        "{error}"
    );
    let error = serde_json::from_str::<EntityId>("5").unwrap_err();
    assert!(!error.to_string().is_empty());
}
