//! The bytes of a bucket's state, of a set of limits and of a usage record.
//!
//! Every encoding starts with a version byte. Numbers are LEB128, signed ones zigzag first. A
//! length byte precedes each name. Every value has exactly one encoding, and the decoder rejects
//! all others. The decoder allocates at most a few times the size of its input, and never panics.
//!
//! `docs/sqlite-format.md` has the layouts and a worked example.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;
use zae_limiter_core::bucket_state::BucketState;
use zae_limiter_core::{
    Bucket, Cell, LIMITS_MAX, LimitName, LimitSet, Millitokens, Rate, Timestamp,
};

const VERSION: u8 = 1;

/// Why bytes do not decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(&'static str);

/// Encodes a bucket state. Its expiry is not included: that has a column of its own.
pub(crate) fn encode_state(state: &BucketState, out: &mut Vec<u8>) {
    let bucket = &state.bucket;
    out.clear();
    out.push(VERSION);
    put_signed(out, bucket.refilled_at().as_millis());
    put_signed(out, state.hour);
    put_number(out, state.events);
    put_number(out, bucket.cells().len() as u64);
    for ((name, rate), cell) in bucket.limits().iter().zip(bucket.cells()) {
        put_limit(out, name, rate);
        put_signed(out, cell.tokens.get());
        put_number(out, cell.remainder);
        put_signed(out, cell.consumed.get());
        put_signed(out, cell.unbooked.get());
    }
}

/// Decodes a bucket state. If it has exactly the `expected` limits, it shares them, and the decoder
/// allocates no names.
pub(crate) fn decode_state(
    bytes: &[u8],
    expires_at: Option<Timestamp>,
    expected: Option<&Arc<LimitSet>>,
) -> Result<BucketState, Malformed> {
    let mut input = Input::versioned(bytes)?;
    let refilled_at = Timestamp::from_millis(input.signed()?);
    let hour = input.signed()?;
    let events = input.number()?;
    let count = input.limit_count()?;
    let mut limits = Limits::new(expected.filter(|expected| expected.len() == count));
    let mut cells: SmallVec<[Cell; 2]> = SmallVec::new();
    for _ in 0..count {
        let (name, rate) = input.limit()?;
        limits.push(name, rate)?;
        let cell = Cell {
            tokens: Millitokens::new(input.signed()?),
            remainder: input.number()?,
            consumed: Millitokens::new(input.signed()?),
            unbooked: Millitokens::new(input.signed()?),
        };
        let is_full = cell.tokens == rate.capacity();
        if cell.tokens > rate.capacity() || cell.remainder >= rate.period_ms() {
            return Err(Malformed("a balance is above its limit"));
        }
        if is_full && cell.remainder > 0 {
            return Err(Malformed("a full bucket has a remainder"));
        }
        cells.push(cell);
    }
    input.end()?;
    let bucket = Bucket::from_parts(limits.finish()?, cells, refilled_at);
    Ok(BucketState { bucket, expires_at, hour, events, rewound_at: None })
}

/// Encodes a set of limits.
pub(crate) fn encode_limits(limits: &LimitSet) -> Vec<u8> {
    let mut out = vec![VERSION];
    put_number(&mut out, limits.len() as u64);
    for (name, rate) in limits.iter() {
        put_limit(&mut out, name, rate);
    }
    out
}

/// Decodes a set of limits.
pub(crate) fn decode_limits(bytes: &[u8]) -> Result<LimitSet, Malformed> {
    let mut input = Input::versioned(bytes)?;
    let count = input.limit_count()?;
    let mut limits = Limits::new(None);
    for _ in 0..count {
        let (name, rate) = input.limit()?;
        limits.push(name, rate)?;
    }
    input.end()?;
    Ok(Arc::unwrap_or_clone(limits.finish()?))
}

/// Encodes the consumption of a usage record, limit by limit.
pub(crate) fn encode_consumed(consumed: &BTreeMap<LimitName, Millitokens>) -> Vec<u8> {
    let mut out = vec![VERSION];
    put_number(&mut out, consumed.len() as u64);
    for (name, amount) in consumed {
        put_name(&mut out, name);
        put_signed(&mut out, amount.get());
    }
    out
}

/// Decodes the consumption of a usage record.
pub(crate) fn decode_consumed(bytes: &[u8]) -> Result<BTreeMap<LimitName, Millitokens>, Malformed> {
    let mut input = Input::versioned(bytes)?;
    let mut consumed = BTreeMap::new();
    for _ in 0..input.number()? {
        let name = limit_name(input.name()?)?;
        if consumed.last_key_value().is_some_and(|(last, _)| *last >= name) {
            return Err(Malformed("the limits are not in order"));
        }
        consumed.insert(name, Millitokens::new(input.signed()?));
    }
    input.end()?;
    Ok(consumed)
}

fn put_limit(out: &mut Vec<u8>, name: &LimitName, rate: &Rate) {
    put_name(out, name);
    put_number(out, rate.capacity().get().unsigned_abs());
    put_number(out, rate.refill_amount().get().unsigned_abs());
    put_number(out, rate.period_ms());
}

fn put_name(out: &mut Vec<u8>, name: &LimitName) {
    out.push(u8::try_from(name.as_str().len()).expect("a limit name has at most 64 bytes"));
    out.extend_from_slice(name.as_str().as_bytes());
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push((number & 0x7f) as u8);
}

fn put_signed(out: &mut Vec<u8>, number: i64) {
    put_number(out, ((number << 1) ^ (number >> 63)).cast_unsigned());
}

fn limit_name(text: &str) -> Result<LimitName, Malformed> {
    LimitName::new(text).map_err(|_| Malformed("a limit has an invalid name"))
}

/// Collects limits while they are decoded: shares the expected ones until one differs, then copies.
struct Limits<'a> {
    expected: Option<&'a Arc<LimitSet>>,
    matched: usize,
    own: Vec<(LimitName, Rate)>,
}

impl<'a> Limits<'a> {
    fn new(expected: Option<&'a Arc<LimitSet>>) -> Self {
        Self { expected, matched: 0, own: Vec::new() }
    }

    fn push(&mut self, name: &str, rate: Rate) -> Result<(), Malformed> {
        if let Some(expected) = self.expected {
            let at = self.matched;
            if expected.names()[at].as_str() == name && expected.rates()[at] == rate {
                self.matched += 1;
                return Ok(());
            }
            let matched = expected.iter().take(at);
            self.own = matched.map(|(name, rate)| (name.clone(), *rate)).collect();
            self.expected = None;
        }
        if self.own.last().is_some_and(|(last, _)| last.as_str() >= name) {
            return Err(Malformed("the limits are not in order"));
        }
        self.own.push((limit_name(name)?, rate));
        Ok(())
    }

    fn finish(self) -> Result<Arc<LimitSet>, Malformed> {
        match self.expected {
            Some(expected) => Ok(Arc::clone(expected)),
            None => match LimitSet::from_rates(self.own) {
                Ok(limits) => Ok(Arc::new(limits)),
                Err(_) => Err(Malformed("the limits are not valid")),
            },
        }
    }
}

/// The bytes that are not decoded yet.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn versioned(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match bytes.split_first() {
            Some((&VERSION, rest)) => Ok(Self(rest)),
            Some(_) => Err(Malformed("the encoding has an unsupported version")),
            None => Err(Malformed("the encoding is empty")),
        }
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        let (&first, rest) =
            self.0.split_first().ok_or(Malformed("the encoding ends too early"))?;
        self.0 = rest;
        Ok(first)
    }

    fn number(&mut self) -> Result<u64, Malformed> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            let is_last = byte < 0x80;
            // The tenth byte has room for one bit. A final zero byte would be a second encoding.
            if (shift == 63 && bits > 1) || (is_last && bits == 0 && shift > 0) {
                break;
            }
            number |= bits << shift;
            if is_last {
                return Ok(number);
            }
        }
        Err(Malformed("a number is malformed"))
    }

    fn signed(&mut self) -> Result<i64, Malformed> {
        let zigzag = self.number()?;
        Ok((zigzag >> 1).cast_signed() ^ -((zigzag & 1).cast_signed()))
    }

    fn name(&mut self) -> Result<&'a str, Malformed> {
        let length = usize::from(self.byte()?);
        let (name, rest) =
            self.0.split_at_checked(length).ok_or(Malformed("the encoding ends too early"))?;
        self.0 = rest;
        std::str::from_utf8(name).map_err(|_| Malformed("a name is not UTF-8"))
    }

    fn limit_count(&mut self) -> Result<usize, Malformed> {
        let count = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        if count > LIMITS_MAX { Err(Malformed("there are too many limits")) } else { Ok(count) }
    }

    fn limit(&mut self) -> Result<(&'a str, Rate), Malformed> {
        let name = self.name()?;
        let (capacity, refill_amount) = (self.amount()?, self.amount()?);
        let rate = Rate::new(capacity, refill_amount, self.number()?);
        Ok((name, rate.map_err(|_| Malformed("a limit is out of bounds"))?))
    }

    fn amount(&mut self) -> Result<Millitokens, Malformed> {
        let amount = i64::try_from(self.number()?);
        amount.map(Millitokens::new).map_err(|_| Malformed("a limit is out of bounds"))
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed("bytes follow the end of the encoding"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

    use super::*;

    fn runner(cases: u32) -> TestRunner {
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
    }

    fn rates() -> impl Strategy<Value = Rate> {
        let amounts = 1..=1_000_000_000_000_000_i64;
        (amounts.clone(), amounts, 1..=1_000_000_000_000_u64).prop_map(|(capacity, refill, ms)| {
            Rate::new(Millitokens::new(capacity), Millitokens::new(refill), ms).unwrap()
        })
    }

    fn states() -> impl Strategy<Value = BucketState> {
        let cell = (any::<i64>(), any::<u64>(), any::<i64>(), any::<i64>());
        let limits = prop::collection::btree_map("[a-z][a-z0-9_.-]{0,20}x", (rates(), cell), 0..6);
        (limits, any::<i64>(), any::<i64>(), any::<u64>(), any::<Option<i64>>()).prop_map(
            |(limits, refilled_at, hour, events, expires_at)| {
                let set = limits.iter().map(|(n, (rate, _))| (LimitName::new(n).unwrap(), *rate));
                let set = Arc::new(LimitSet::from_rates(set).unwrap());
                let cells =
                    limits.values().map(|(_, (tokens, remainder, consumed, unbooked))| Cell {
                        tokens: Millitokens::new(*tokens),
                        remainder: *remainder,
                        consumed: Millitokens::new(*consumed),
                        unbooked: Millitokens::new(*unbooked),
                    });
                let refilled_at = Timestamp::from_millis(refilled_at);
                let bucket = Bucket::from_parts(set, cells, refilled_at);
                let expires_at = expires_at.map(Timestamp::from_millis);
                BucketState { bucket, expires_at, hour, events, rewound_at: None }
            },
        )
    }

    fn encoded(state: &BucketState) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_state(state, &mut bytes);
        bytes
    }

    #[test]
    fn a_state_decodes_to_what_was_encoded() {
        let check = |state: BucketState| {
            let bytes = encoded(&state);
            let plain = decode_state(&bytes, state.expires_at, None);
            prop_assert_eq!(plain.as_ref(), Ok(&state));
            let shared = decode_state(&bytes, state.expires_at, Some(state.bucket.limits()));
            let shared = shared.unwrap();
            prop_assert!(Arc::ptr_eq(shared.bucket.limits(), state.bucket.limits()));
            prop_assert_eq!(&shared, &state);
            let limits = decode_limits(&encode_limits(state.bucket.limits()));
            prop_assert_eq!(limits.as_ref(), Ok(&**state.bucket.limits()));
            Ok(())
        };
        runner(512).run(&states(), check).unwrap();
    }

    #[test]
    fn expected_limits_that_differ_never_end_up_in_the_state() {
        let check = |(state, guess): (BucketState, BucketState)| {
            let bytes = encoded(&state);
            let read = decode_state(&bytes, state.expires_at, Some(guess.bucket.limits()));
            prop_assert_eq!(read, Ok(state));
            Ok(())
        };
        runner(512).run(&(states(), states()), check).unwrap();
        // The worst guess: all the same but the last number.
        let names = |last| {
            let rate = |ms| Rate::new(Millitokens::new(5), Millitokens::new(5), ms).unwrap();
            let limits = [("a", 7), ("b", 7), ("c", last)];
            let limits = limits.map(|(name, ms)| (LimitName::new(name).unwrap(), rate(ms)));
            Arc::new(LimitSet::from_rates(limits).unwrap())
        };
        let bucket = Bucket::full(names(7), Timestamp::from_millis(0));
        let state = BucketState { bucket, expires_at: None, hour: 0, events: 0, rewound_at: None };
        assert_eq!(decode_state(&encoded(&state), None, Some(&names(8))), Ok(state));
    }

    #[test]
    fn changed_bytes_are_rejected_or_are_a_valid_state() {
        let changes = (states(), any::<prop::sample::Index>(), any::<u8>(), any::<usize>());
        let check = |(state, at, byte, cut): (BucketState, prop::sample::Index, u8, usize)| {
            let whole = encoded(&state);
            let mut bytes = whole.clone();
            bytes[at.index(whole.len())] = byte;
            if let Ok(read) = decode_state(&bytes, None, Some(state.bucket.limits())) {
                prop_assert_eq!(&encoded(&read), &bytes);
            }
            prop_assert!(decode_state(&whole[..cut % whole.len()], None, None).is_err());
            let longer = [&whole[..], &[byte]].concat();
            prop_assert!(decode_state(&longer, None, None).is_err());
            Ok(())
        };
        runner(4_096).run(&changes, check).unwrap();
    }

    #[test]
    fn any_bytes_are_rejected_or_are_the_only_encoding_of_a_state() {
        let check = |mut bytes: Vec<u8>| {
            if let Some(first) = bytes.first_mut() {
                *first %= 3;
            }
            crate::fuzz_decode(&bytes);
            if let Ok(state) = decode_state(&bytes, None, None) {
                prop_assert_eq!(&encoded(&state), &bytes);
            }
            Ok(())
        };
        let bytes = prop::collection::vec(any::<u8>(), 0..64);
        runner(8_192).run(&bytes, check).unwrap();
    }

    #[test]
    fn numbers_have_one_encoding() {
        for number in [0, 1, 127, 128, 1 << 20, u64::MAX - 1, u64::MAX] {
            let mut bytes = Vec::new();
            put_number(&mut bytes, number);
            assert_eq!(Input(&bytes).number(), Ok(number));
        }
        for number in [0, -1, 1, i64::MIN, i64::MAX] {
            let mut bytes = Vec::new();
            put_signed(&mut bytes, number);
            assert_eq!(Input(&bytes).signed(), Ok(number));
        }
        let too_long: &[&[u8]] = &[&[0x80, 0], &[0x80], &[0xff; 10], &[0xff; 11], &[]];
        for bytes in too_long {
            assert!(Input(bytes).number().is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn consumption_decodes_to_what_was_encoded() {
        let maps = prop::collection::btree_map("[a-z]{1,9}x", any::<i64>(), 0..9);
        let check = |map: BTreeMap<String, i64>| {
            let pairs = map.into_iter();
            let map = pairs.map(|(n, v)| (LimitName::new(n).unwrap(), Millitokens::new(v)));
            let map: BTreeMap<_, _> = map.collect();
            prop_assert_eq!(decode_consumed(&encode_consumed(&map)), Ok(map));
            Ok(())
        };
        runner(256).run(&maps, check).unwrap();
    }
}
