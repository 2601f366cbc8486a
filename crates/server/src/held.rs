//! Sessions that outlive their connections, of every face that has such (EV-940, EV-941, LM-964, LM-965, D-29).
//!
//! Owns: [`Held`]: which token brings whom back to what, and how many places there are. Refuses to know: what is held, what
//! it does meanwhile and for how long. How many there are is bounded here, and what they hold counts like everybody
//! else's (EV-801).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::caller::Identity;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// What nobody can guess.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Token(Arc<str>);

impl Token {
    /// `None` if the system has no randomness to give.
    fn random(kind: Kind) -> Option<Self> {
        let mut bytes = vec![0; kind.bytes];
        let source = rustls::crypto::ring::default_provider().secure_random;
        source.fill(&mut bytes).ok()?;
        let text = format!("{}{}", kind.prefix, URL_SAFE_NO_PAD.encode(bytes));
        Some(Self(text.into()))
    }

    /// As clients send it.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

/// How tokens of a face look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// What they begin with.
    pub(crate) prefix: &'static str,
    /// Random bytes of each.
    pub(crate) bytes: usize,
}

/// The sessions that can be come back to; `B` is the way back to one, and what ends with its place.
pub(crate) struct Held<B> {
    places: Mutex<Places<B>>,
    kind: Kind,
    most: usize,
    /// How many of them one visitor may have, so that none takes all.
    most_each: usize,
}

struct Places<B> {
    by_token: HashMap<Arc<str>, Place<B>>,
    /// How many each has.
    taken: HashMap<Identity, usize>,
}

impl<B> Places<B> {
    fn remove(&mut self, token: &Token) -> Option<Place<B>> {
        let place = self.by_token.remove(&token.0)?;
        if let Some(taken) = self.taken.get_mut(&place.visitor) {
            *taken -= 1;
            if *taken == 0 {
                self.taken.remove(&place.visitor);
            }
        }
        Some(place)
    }
}

struct Place<B> {
    visitor: Identity,
    back: Option<B>,
}

/// Held by a session: its end is the end of the token.
pub(crate) struct Stay<B> {
    held: Weak<Held<B>>,
    token: Token,
}

impl<B> Held<B> {
    pub(crate) fn new(kind: Kind, most: usize, most_each: usize) -> Self {
        let places = Places {
            by_token: HashMap::new(),
            taken: HashMap::new(),
        };
        Self {
            places: Mutex::new(places),
            kind,
            most,
            most_each,
        }
    }

    /// A token for a session of `visitor`; `None` where there are as many as there may be, of all or of these, and the
    /// session is one without resume.
    pub(crate) fn issue(self: &Arc<Self>, visitor: &Identity) -> Option<(Token, Stay<B>)> {
        let token = Token::random(self.kind)?;
        let mut places = self.places();
        let taken = places.taken.get(visitor).copied().unwrap_or(0);
        if places.by_token.len() >= self.most || taken >= self.most_each {
            return None;
        }
        let place = Place {
            visitor: visitor.clone(),
            back: None,
        };
        places.by_token.insert(Arc::clone(&token.0), place);
        places.taken.insert(visitor.clone(), taken + 1);
        let stay = Stay {
            held: Arc::downgrade(self),
            token: token.clone(),
        };
        Some((token, stay))
    }

    /// Ends what can be spared first, to make room for `visitor`: of its own where it has as many as it may, else of all.
    /// `when` says which can be, and in which order; it must not come back here.
    pub(crate) fn spare<T: Ord>(&self, visitor: &Identity, when: impl Fn(&B) -> Option<T>) {
        let mut places = self.places();
        let taken = places.taken.get(visitor).copied().unwrap_or(0);
        let mine = taken >= self.most_each;
        let can_go = places.by_token.iter().filter_map(|(token, place)| {
            let asked = !mine || place.visitor == *visitor;
            let back = place.back.as_ref().filter(|_| asked)?;
            Some((when(back)?, token))
        });
        let first = can_go.min_by(|(one, _), (other, _)| one.cmp(other));
        let first = first.map(|(_, token)| Token(Arc::clone(token)));
        let gone = first.and_then(|token| places.remove(&token));
        drop(places);
        // What ends with it does so when nothing is locked any more.
        drop(gone);
    }

    /// How to come back. A session that is over already needs no way.
    pub(crate) fn keep(&self, token: &Token, back: B) {
        let mut back = Some(back);
        if let Some(place) = self.places().by_token.get_mut(&token.0) {
            std::mem::swap(&mut place.back, &mut back);
        }
        // What was there before goes when nothing is locked any more.
        drop(back);
    }

    /// The way back for `visitor`, if there is one. Unknown, ended and somebody else's are one answer.
    pub(crate) fn back<T>(
        &self,
        token: &str,
        visitor: &Identity,
        way: impl FnOnce(&B) -> T,
    ) -> Option<T> {
        let places = self.places();
        let place = places.by_token.get(token);
        let place = place.filter(|place| visitor.may_use_what(&place.visitor));
        place?.back.as_ref().map(way)
    }

    fn places(&self) -> MutexGuard<'_, Places<B>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B> Drop for Stay<B> {
    fn drop(&mut self) {
        let place = self.held.upgrade();
        let place = place.and_then(|held| held.places().remove(&self.token));
        drop(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Identity {
        Identity::Key(name.into())
    }

    fn at(address: &str) -> Identity {
        Identity::Anonymous(Some(address.parse().unwrap()))
    }

    /// D-29
    #[test]
    fn ev_940_nobody_takes_all_places_with_a_key_or_without_one() {
        let kind = Kind {
            prefix: "s_",
            bytes: 16,
        };
        let held = Arc::new(Held::<()>::new(kind, 7, 2));
        // Each has two places, and not a third, whatever the others have.
        let mut stays = Vec::new();
        for visitor in [key("key"), at("10.0.0.1"), at("10.0.0.2")] {
            for turn in 0..3 {
                let issued = held.issue(&visitor);
                assert_eq!(issued.is_some(), turn < 2, "{visitor:?}");
                stays.extend(issued);
            }
        }
        // The seventh place is the last of all.
        stays.extend(held.issue(&key("other")));
        assert_eq!(stays.len(), 7);
        assert!(held.issue(&key("third")).is_none());
        // What can be spared makes room, of one's own where that is full.
        let own = key("key");
        let all: Vec<_> = held.places().by_token.keys().cloned().collect();
        all.into_iter()
            .for_each(|token| held.keep(&Token(token), ()));
        held.spare(&own, |()| None::<u8>);
        assert!(held.issue(&own).is_none());
        held.spare(&own, |()| Some(0));
        stays.extend(held.issue(&own));
        assert_eq!(stays.len(), 8);
        assert!(held.issue(&own).is_none());
        // Who leaves makes room, and leaves nothing behind.
        drop(stays.pop());
        let again = held.issue(&key("key"));
        assert!(again.is_some());
        drop((again, stays));
        let places = held.places();
        assert!(places.by_token.is_empty() && places.taken.is_empty());
    }
}
