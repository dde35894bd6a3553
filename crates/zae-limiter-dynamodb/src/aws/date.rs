//! Reads the date of every response.

use std::sync::Arc;

use aws_sdk_dynamodb::config::interceptors::BeforeDeserializationInterceptorContextRef;
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use zae_limiter_core::Clock;
use zae_limiter_schema::{ResponseDates, parse_http_date};

/// See the module. It runs for every attempt, and for errors, too.
#[derive(Debug)]
pub(super) struct DateReader {
    dates: Arc<ResponseDates>,
    clock: Arc<dyn Clock>,
}

impl DateReader {
    pub(super) fn new(dates: Arc<ResponseDates>, clock: Arc<dyn Clock>) -> Self {
        Self { dates, clock }
    }
}

impl Intercept for DateReader {
    fn name(&self) -> &'static str {
        "DateReader"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context.response().headers().get("date").and_then(parse_http_date);
        self.dates.note(date, self.clock.now(), self.clock.stopwatch());
        Ok(())
    }
}
