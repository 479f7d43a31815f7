//! How what is in a store is kept from being changed, and on demand from being read.
//!
//! ```text
//!   a store without encryption     0 │ content │ keyed hash of context and content, 32 bytes
//!   a store with encryption        1 │ nonce, 12 bytes │ AES-256-GCM of content, with 16 bytes at its end
//! ```
//!
//! The context says what the content is (for a piece, its hash; for a manifest, its object), so that an object put in
//! the place of another is noticed. With encryption each context has a key of its own and each seal a random nonce:
//! one key never sees so many of them that two could be equal. Whatever is changed is found before anything looks at
//! the content, the decompressor included.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::StoreError;
use crate::hash::Hash;
use crate::key::Keys;
use crate::random;

const TAGGED: u8 = 0;
const ENCRYPTED: u8 = 1;
const NONCE: usize = 12;
const TAG: usize = 32;

/// Seals and opens the objects of one store.
pub(crate) struct Sealer {
    tag: [u8; 32],
    encryption: Option<[u8; 32]>,
}

/// What was opened is not what was sealed, or was sealed under another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken;

impl Sealer {
    pub(crate) fn new(keys: &Keys, encrypted: bool) -> Self {
        Self { tag: keys.tag, encryption: encrypted.then_some(keys.encryption) }
    }

    /// Seals the parts of some content, one behind the other.
    pub(crate) fn seal(&self, context: &[&[u8]], parts: &[&[u8]]) -> Result<Vec<u8>, StoreError> {
        let length: usize = parts.iter().map(|it| it.len()).sum();
        let mut sealed = Vec::with_capacity(1 + NONCE + length + TAG);
        match &self.encryption {
            None => {
                sealed.push(TAGGED);
                parts.iter().for_each(|it| sealed.extend_from_slice(it));
                let tag = self.tag(context, &sealed[1..]);
                sealed.extend_from_slice(&tag.to_bytes());
            }
            Some(key) => {
                sealed.push(ENCRYPTED);
                let nonce: [u8; NONCE] = random::bytes()?;
                sealed.extend_from_slice(&nonce);
                parts.iter().for_each(|it| sealed.extend_from_slice(it));
                let (key, aad) = derive(key, context).map_err(|Broken| StoreError::refused("encryption failed"))?;
                let nonce = Nonce::assume_unique_for_key(nonce);
                let tag = key.seal_in_place_separate_tag(nonce, Aad::from(aad), &mut sealed[1 + NONCE..]);
                sealed.extend_from_slice(tag.map_err(|_| StoreError::refused("encryption failed"))?.as_ref());
            }
        }
        Ok(sealed)
    }

    /// The content that was sealed for this context.
    pub(crate) fn open(&self, context: &[&[u8]], mut sealed: Vec<u8>) -> Result<Vec<u8>, Broken> {
        match (&self.encryption, sealed.first()) {
            (None, Some(&TAGGED)) => {
                let end = sealed.len().checked_sub(TAG).filter(|end| *end >= 1).ok_or(Broken)?;
                let tag = sealed[end..].try_into().map_err(|_| Broken)?;
                if !self.tag(context, &sealed[1..end]).is(&Hash::from_bytes(tag)) {
                    return Err(Broken);
                }
                sealed.truncate(end);
                sealed.drain(..1);
                Ok(sealed)
            }
            // A store with encryption has nothing without: whoever writes there may not have the key.
            (Some(key), Some(&ENCRYPTED)) => {
                let nonce = sealed.get(1..1 + NONCE).and_then(|it| it.try_into().ok()).ok_or(Broken)?;
                let (key, aad) = derive(key, context)?;
                let nonce = Nonce::assume_unique_for_key(nonce);
                // The content is moved to the front, over the nonce.
                let opened = key.open_within(nonce, Aad::from(aad), &mut sealed, 1 + NONCE..).map_err(|_| Broken)?;
                let length = opened.len();
                sealed.truncate(length);
                Ok(sealed)
            }
            _ => Err(Broken),
        }
    }

    fn tag(&self, context: &[&[u8]], content: &[u8]) -> Hash {
        let parts: Vec<&[u8]> = context.iter().copied().chain([content]).collect();
        Hash::of_parts(&self.tag, &parts)
    }

    /// The bytes that a seal adds at most.
    pub(crate) const fn overhead() -> u64 {
        (1 + NONCE + TAG) as u64
    }
}

/// The key for one context, and what goes into its tags.
fn derive(key: &[u8; 32], context: &[&[u8]]) -> Result<(LessSafeKey, [u8; 32]), Broken> {
    let derived = Hash::of_parts(key, context).to_bytes();
    let key = UnboundKey::new(&AES_256_GCM, &derived).map_err(|_| Broken)?;
    Ok((LessSafeKey::new(key), Hash::of_parts(&[0; 32], context).to_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::StoreKey;

    fn sealers() -> [Sealer; 2] {
        let keys = Keys::derive(Some(&StoreKey::from_bytes([9; 32])));
        [Sealer::new(&keys, false), Sealer::new(&keys, true)]
    }

    #[test]
    fn what_was_sealed_is_opened_and_every_changed_bit_is_found() {
        for sealer in sealers() {
            for content in [&b""[..], b"x", b"some content"] {
                let sealed = sealer
                    .seal(&[b"piece", b"1"], &[&content[..content.len() / 2], &content[content.len() / 2..]])
                    .unwrap();
                assert!(sealed.len() as u64 <= content.len() as u64 + Sealer::overhead());
                assert_eq!(sealer.open(&[b"piece", b"1"], sealed.clone()).unwrap(), content);
                assert_eq!(sealer.open(&[b"piece", b"2"], sealed.clone()), Err(Broken));
                for bit in 0..sealed.len() * 8 {
                    let mut changed = sealed.clone();
                    changed[bit / 8] ^= 1 << (bit % 8);
                    assert_eq!(sealer.open(&[b"piece", b"1"], changed), Err(Broken), "bit {bit}");
                }
                for length in 0..sealed.len() {
                    assert_eq!(sealer.open(&[b"piece", b"1"], sealed[..length].to_vec()), Err(Broken));
                }
            }
        }
    }

    #[test]
    fn one_store_does_not_open_what_another_has_sealed() {
        let [tagged, encrypted] = sealers();
        let other = Sealer::new(&Keys::derive(None), false);
        let sealed = tagged.seal(&[b"a"], &[b"content"]).unwrap();
        assert_eq!(encrypted.open(&[b"a"], sealed.clone()), Err(Broken));
        assert_eq!(other.open(&[b"a"], sealed), Err(Broken));
    }

    #[test]
    fn encrypted_content_is_not_to_be_seen_and_differs_each_time() {
        let [_, encrypted] = sealers();
        let [one, two] = [(); 2].map(|()| encrypted.seal(&[b"a"], &[b"a secret of some length"]).unwrap());
        assert_ne!(one, two);
        assert!(!one.windows(6).any(|it| it == b"secret"));
    }
}
